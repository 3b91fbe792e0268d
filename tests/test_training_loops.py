"""What no random training program does: two optimizers, checkpoints, and a change of precision."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

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
