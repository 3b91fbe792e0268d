"""Training loops of every library, a few lines each, with one bad batch each."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
from testing import cheap_keys
from testing.random_programs.evaluate import arrays_in_numpy

KEY = cheap_keys.key(0)
X = np.random.default_rng(1).normal(size=(32, 8)).astype(np.float32)
Y = np.sin(X.sum(-1, keepdims=True))
BAD = X.copy()
BAD[3, 3] = np.inf
BATCHES = [jax.device_put(x) for x in (X, X, BAD, X, X, X, X, X)]


def optimizer(**kwargs):
    return mpjax.dynamic_loss_scale(optax.adam(1e-2), growth_interval=3, **kwargs)


def assert_learned(losses, opt_state):
    """All but the bad step are finite, the loss fell, the bad step was skipped and counted."""
    losses = np.array(losses)
    assert np.isfinite(np.delete(losses, 2)).all()
    assert losses[-1] < 0.9 * losses[0]
    assert int(optax.tree_utils.tree_get(opt_state, "skipped_steps")) == 1


def test_plain_jax_in_scan():
    tx = optimizer()

    def loss_fn(params, x):
        hidden = jnp.tanh((x.astype(jnp.float16) @ params[0].astype(jnp.float16)).astype(jnp.float32))
        return jnp.mean((hidden @ params[1] - Y) ** 2)

    def step(carry, x):
        params, state = carry
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x)
        return mpjax.apply_gradients(tx, grads, state, params, value=loss), loss

    rng = np.random.default_rng(0)
    params = [0.3 * rng.normal(size=shape).astype(np.float32) for shape in ((8, 16), (16, 1))]
    run = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))
    (params, state), losses = run((params, tx.init(params)), np.stack(BATCHES))
    assert_learned(losses, state)


def test_flax_train_state():
    model = nn.Sequential([nn.Dense(16, dtype=jnp.float16), nn.tanh, nn.Dense(1, dtype=jnp.float16)])
    params = arrays_in_numpy(model.init)(KEY, X)["params"]
    train_state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer())

    @jax.jit
    def step(ts, x):
        loss_fn = lambda p: jnp.mean((ts.apply_fn({"params": p}, x).astype(jnp.float32) - Y) ** 2)
        loss, grads = jax.value_and_grad(mpjax.scale_loss(loss_fn, ts))(ts.params)
        return ts.apply_gradients(grads=grads), loss

    losses = []
    for x in BATCHES:
        train_state, loss = step(train_state, x)
        losses.append(loss)
    assert_learned(losses, train_state.opt_state)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(8, 16, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, dtype=jnp.float16, rngs=rngs)
        self.outer = nnx.Linear(16, 1, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.norm(self.inner(x)))).astype(jnp.float32)


def test_nnx_optimizer_with_batch_statistics_kept_on_a_skipped_step():
    model = nnx.jit(lambda: Net(nnx.Rngs(KEY)))()
    optimizer_ = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model, opt, x):
        old = nnx.as_pure(nnx.state(model, nnx.BatchStat))
        loss, grads = nnx.value_and_grad(mpjax.scale_loss(lambda m: jnp.mean((m(x) - Y) ** 2), opt))(model)
        opt.update(model, grads, value=loss)
        nnx.update(model, mpjax.keep_if_finite(opt, nnx.as_pure(nnx.state(model, nnx.BatchStat)), old))
        return loss

    losses = [step(model, optimizer_, x) for x in BATCHES]
    assert_learned(losses, nnx.as_pure(optimizer_.opt_state))
    assert np.isfinite(model.norm.mean[...]).all()


def test_haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 1], activation=jnp.tanh)(x)))
    params, tx = arrays_in_numpy(net.init)(KEY, X), optimizer()
    policy = mpjax.get_policy("mixed_float16")
    loss_fn = lambda p, x: jnp.mean(
        (net.apply(policy.cast_to_compute(p), policy.cast_to_compute(x)).astype(jnp.float32) - Y) ** 2
    )

    @jax.jit
    def step(params, state, x):
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x)
        return *mpjax.apply_gradients(tx, grads, state, params, value=loss), loss

    state, losses = tx.init(params), []
    for x in BATCHES:
        params, state, loss = step(params, state, x)
        losses.append(loss)
    assert_learned(losses, state)


def test_equinox():
    model, tx = eqx.filter_jit(lambda: eqx.nn.MLP(8, 1, 16, 1, key=KEY))(), optimizer()
    policy = mpjax.get_policy("mixed_float16")
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, x):
        half = policy.cast_to_compute(model)
        return jnp.mean((jax.vmap(half)(policy.cast_to_compute(x)).astype(jnp.float32) - Y) ** 2)

    @eqx.filter_jit
    def step(model, state, x):
        loss, grads = eqx.filter_value_and_grad(mpjax.scale_loss(loss_fn, state))(model, x)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array), value=loss)
        return eqx.apply_updates(model, updates), state, loss

    losses = []
    for x in BATCHES:
        model, state, loss = step(model, state, x)
        losses.append(loss)
    assert_learned(losses, state)


def test_gan_with_two_optimizers_and_two_scales():
    generator, critic = {"w": np.eye(8, dtype=np.float32) / 10}, {"w": np.full((8, 1), 0.1, np.float32)}
    g_tx, d_tx = optimizer(init_scale=2.0**8), optimizer(init_scale=2.0**12)
    score = lambda d, x: x.astype(jnp.float16) @ d["w"].astype(jnp.float16)
    d_loss = lambda d, g, z: jnp.mean(
        nn.softplus(score(d, z @ g["w"]).astype(jnp.float32)) + nn.softplus(-score(d, X).astype(jnp.float32))
    )
    g_loss = lambda g, d, z: jnp.mean(nn.softplus(-score(d, z @ g["w"]).astype(jnp.float32)))

    @jax.jit
    def step(g, g_state, d, d_state, z, bad):
        loss, grads = mpjax.value_and_grad(d_loss, d_state)(d, g, z)
        d, d_state = mpjax.apply_gradients(d_tx, grads, d_state, d, value=loss)
        loss, grads = mpjax.value_and_grad(g_loss, g_state)(g, d, z)
        grads["w"] = jnp.where(bad, jnp.inf, grads["w"])  # only the generator overflows
        g, g_state = mpjax.apply_gradients(g_tx, grads, g_state, g, value=loss)
        return g, g_state, d, d_state

    g_state, d_state = g_tx.init(generator), d_tx.init(critic)
    for i in range(6):
        generator, g_state, critic, d_state = step(generator, g_state, critic, d_state, X, i == 2)
    assert (int(g_state.skipped_steps), int(d_state.skipped_steps)) == (1, 0)
    assert (float(g_state.loss_scale), float(d_state.loss_scale)) == (2.0**8, 2.0**14)


WEIGHTS = {"w": np.ones((8, 1), np.float32)}


def linear_step(tx, half):
    def loss_fn(params, x):
        return jnp.mean(((x.astype(half) @ params["w"].astype(half)).astype(jnp.float32) - Y) ** 2)

    def step(params, state, x):
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x)
        return mpjax.apply_gradients(tx, grads, state, params, value=loss)

    return step


def test_orbax_restores_to_a_bitwise_equal_next_step(tmp_path):
    tx = optimizer(min_scale=2.0**14, max_scale=2.0**16)
    step = jax.jit(linear_step(tx, jnp.float16))
    params, state = WEIGHTS, tx.init(WEIGHTS)
    for x in BATCHES:
        params, state = step(params, state, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", (params, state))
        checkpointer.wait_until_finished()
        template = jax.eval_shape(lambda: (WEIGHTS, tx.init(WEIGHTS)))
        # NumPy arrays, because the step would be compiled again for the devices that Orbax chose.
        restored = jax.tree.map(np.asarray, checkpointer.restore(tmp_path / "checkpoint", template))
    again = step(*restored, X)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(step(params, state, X)), strict=True):
        np.testing.assert_array_equal(a, b)
    for _ in range(9):  # the transformation still has its limits
        params, state = step(*restored, BATCHES[2])
        restored = (params, state)
    assert float(optax.tree_utils.tree_get(state, "loss_scale")) == 2.0**14


@pytest.mark.parametrize("there", ["float32", "mixed_bfloat16"])
def test_float16_run_continues_in_another_precision_and_back_with_its_moments(there):
    float16, other = (mpjax.loss_scale_for(optax.adam(1e-2), p, init_scale=2.0**8) for p in ("mixed_float16", there))
    step = arrays_in_numpy(linear_step(float16, jnp.float16))
    params, state = step(WEIGHTS, float16.init(WEIGHTS), X)
    # The states have one structure; the inner state moves over, and the new policy has its own scale.
    moved = other.init(params)._replace(inner_state=state.inner_state)
    assert float(moved.loss_scale) == 1.0
    params, moved = arrays_in_numpy(linear_step(other, mpjax.get_policy(there).compute_dtype))(params, moved, X)
    back = float16.init(params)._replace(inner_state=moved.inner_state)
    params, back = step(params, back, X)
    assert float(back.loss_scale) == 2.0**8
    assert int(back.inner_state[0].count) == 3
