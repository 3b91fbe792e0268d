"""`watch`: statistics by module inside of a compiled step, which change nothing and cost little."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.random_programs.evaluate import arrays_in_numpy

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, name="first")(x))
        return nn.remat(nn.Dense)(4, name="second")(x)


NET = Net()
PARAMS = arrays_in_numpy(NET.init)(cheap_keys.key(1), X)


def loss_fn(params, x):
    return jnp.mean(NET.apply(params, x) ** 2)


def training(every=2, callback=None, scan=0, keep=4):
    """A step under dynamic loss scaling and autocast; `scan` of them in one call, if it is not 0."""
    watched = mpjax.watch(loss_fn, every=every, callback=callback, keep=keep, policy="mixed_float16")
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.01), init_scale=2.0**10)

    def step(params, opt_state, state, x):
        _, grads = mpjax.value_and_grad(loss_fn, opt_state, policy="mixed_float16")(params, x)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        # Both ways to tell of an overflow.
        told = {"grads": grads} if scan else {"finite": new_opt_state}
        state = watched.update(state, params, x, opt_state=opt_state, **told)
        return optax.apply_updates(params, updates), new_opt_state, state

    def steps(params, opt_state, state, xs):
        return jax.lax.scan(lambda carry, x: (step(*carry, x), None), (params, opt_state, state), xs)[0]

    return jax.jit(steps if scan else step), (PARAMS, tx.init(PARAMS), watched.init(PARAMS, X))


def row(record, name, phase):
    return next(row for row in record.modules if (row.name, row.phase) == (name, phase))


@pytest.fixture(scope="module")
def trained():
    """Five steps one by one; the fourth overflows."""
    told = []
    step, carry = training(callback=told.append)
    for i in range(5):
        carry = step(*carry, X * 1e30 if i == 3 else X)
    jax.effects_barrier()
    return step, carry, told


def test_statistics_are_those_of_the_step(trained):
    _, (_, _, state), told = trained
    assert [record.step for record in state.records()] == [0, 2, 3, 4]
    assert sorted(record.step for record in told) == [0, 2, 3, 4]
    first = state.records()[0]
    dense = PARAMS["params"]["first"]
    expected = np.abs(np.asarray(X @ dense["kernel"] + dense["bias"])).max()
    assert row(first, "Net/first", "forward").amax == pytest.approx(expected, rel=1e-2)
    assert {(row.name, row.phase) for row in first.modules} >= {("Net/second", "forward"), ("Net/first", "backward")}
    assert not any(row.nonfinite for row in first.modules)
    assert not first.overflow
    assert first.loss_scale == 2.0**10


def test_gradients_are_reported_without_the_loss_scale(trained):
    grads = jax.grad(loss_fn)(PARAMS, X)["params"]["second"]["kernel"]
    found = row(trained[1][2].records()[0], "Net/second", "backward")
    outputs = jax.grad(lambda y: jnp.mean(y**2))(NET.apply(PARAMS, X))
    assert found.amax == pytest.approx(max(np.abs(grads).max(), np.abs(outputs).max()), rel=0.02)


def test_an_overflow_is_recorded_between_two_watched_steps(trained):
    _, (_, opt_state, state), told = trained
    overflow = next(record for record in told if record.overflow)
    assert overflow.step == 3, "between two watched steps"
    assert row(overflow, "Net/first", "forward").nonfinite > 0
    assert opt_state.skipped_steps == 1
    text = str(overflow)
    assert text.startswith("step 3, loss scale 1024: overflow\nfirst inf or NaN: Net/first, forward")
    assert max(map(len, text.splitlines())) <= 100
    assert not any(record.overflow for record in state.records() if record.step != 3)


def test_nothing_is_compiled_again_and_no_result_changes(trained):
    step, (params, opt_state, _), _ = trained
    assert step._cache_size() == 1
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.01), init_scale=2.0**10)

    @jax.jit
    def plain(params, opt_state, x):
        _, grads = mpjax.value_and_grad(loss_fn, opt_state, policy="mixed_float16")(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    expected = PARAMS, tx.init(PARAMS)
    for i in range(5):
        expected = plain(*expected, X * 1e30 if i == 3 else X)
    jax.tree.map(np.testing.assert_array_equal, (params, opt_state), expected)


def test_scan_over_steps_and_a_ring_of_the_last_records():
    told = []
    steps, carry = training(every=1, callback=told.append, scan=6, keep=3)
    _, _, state = steps(*carry, jnp.stack([X] * 6))
    jax.effects_barrier()
    assert [record.step for record in state.records()] == [3, 4, 5]
    assert sorted(record.step for record in told) == list(range(6))
    amax = [row(record, "Net/second", "forward").amax for record in state.records()]
    assert amax[0] > amax[-1] > 0, "the loss falls"


def test_repeated_overflows_are_recorded_once():
    told = []
    step, carry = training(every=100, callback=told.append)
    for _ in range(3):
        carry = step(*carry, X * 1e30)
    assert [record.step for record in carry[2].records()] == [0]
    for x in (X, X * 1e30, X * 1e30):
        carry = step(*carry, x)
    assert [record.step for record in carry[2].records()] == [0, 4]
    jax.effects_barrier()
    assert len(told) == 2


def test_flushed_is_the_share_of_values_that_become_zero():
    def loss(w, x):
        with jax.named_scope("tiny"):
            y = (x @ w).astype(jnp.float16) * jnp.float16(2.0**-12)
        return jnp.sum(y.astype(jnp.float32))

    x = jnp.diag(2.0 ** -jnp.arange(0.0, 16.0))
    watched = mpjax.watch(loss)
    state = jax.jit(lambda s, w, x: watched.update(s, w, x))(watched.init(jnp.eye(16), x), jnp.eye(16), x)
    (record,) = state.records()
    # Of 2^-12 ... 2^-27 those up to 2^-25 are zero in float16. The product, which is cast to it, is 2^0 ... 2^-15.
    assert row(record, "tiny", "forward").flushed == 3 / 32


def test_gradients_that_are_all_flushed_are_the_first_row_and_a_warning():
    watched = mpjax.watch(lambda params, x: 1e-9 * loss_fn(params, x), policy="mixed_float16")
    (record,) = jax.jit(watched.update)(watched.init(PARAMS, X), PARAMS, X).records()
    gradient = row(record, "Net/second", "backward")
    assert gradient.flushed == 1
    assert 0 < gradient.amax < 1e-8
    lines = str(record).splitlines()
    # The first of them is the gradient of the loss, which the last layer's matmul reads in half.
    assert lines[1].startswith("warning: flushed to zero are most values of loss_fn (test_watch.py), backward (100%)")
    assert re.match(r"\S+ .*backward .* 100.00%", lines[-len(record.modules)])
    assert record.scalars()["backward/Net/second/flushed"] == 1
    assert "backward/Net/second/zeros" in record.scalars()


def test_a_float32_value_is_judged_in_the_dtype_in_which_a_matmul_reads_it():
    loss = lambda w, x: 1e-8 * jnp.mean(jnp.tanh(x @ w) ** 2)
    w, x = jnp.eye(16) / 2, jnp.ones((8, 16))
    watched = mpjax.watch(loss, policy="mixed_float16")
    (record,) = jax.jit(watched.update)(watched.init(w, x), w, x).records()
    assert not np.any(jax.grad(mpjax.autocast(loss, "mixed_float16"))(w, x)), "all gradients are zero"
    assert "gradients need a larger loss scale" in " ".join(str(record).split())


def test_a_record_of_an_overflow_has_the_size_of_what_overflowed(trained):
    overflow = next(record for record in trained[2] if record.overflow)
    assert row(overflow, "Net/first", "forward").amax > 1e29


def test_a_loss_that_is_not_finite_is_recorded_though_its_gradients_are():
    def loss(w, x):
        return jnp.mean((x @ w) ** 2) + jax.lax.stop_gradient(jnp.log(x[0, 0]))

    watched = mpjax.watch(loss)
    for first, bad in ((1.0, 0), (-1.0, 1)):
        x = X.copy()
        x[0, 0] = first
        (record,) = watched.update(watched.init(np.eye(16), x), np.eye(16), x).records()
        assert sum(row.nonfinite for row in record.modules) == bad, str(record)
        assert ("first inf or NaN: loss" in str(record)) == bool(bad)


def test_nnx_modules_and_argnums_and_aux():
    class Model(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.up(x)

    def loss(x, model):
        return jnp.mean(model(x) ** 2), x

    model = Model()
    watched = mpjax.watch(loss, policy="mixed_bfloat16", argnums=1, has_aux=True)

    @nnx.jit
    def step(state, x, model):
        return watched.update(state, x, model)

    (record,) = step(watched.init(X, model), X, model).records()
    assert {row.name for row in record.modules if row.phase == "forward"} >= {"Model/up"}
    assert "forward/Model/up/amax" in record.scalars()


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the XLA of an older JAX copies them")
def test_a_record_before_the_optimizer_copies_no_donated_parameter():
    w, tx = jnp.eye(16), mpjax.dynamic_loss_scale(optax.adam(1e-3))
    watched = mpjax.watch(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), every=100)

    def step(w, opt_state, state, x):
        grads = mpjax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), opt_state)(w, x)
        state = watched.update(state, w, x, opt_state=opt_state, grads=grads)
        w, grads, state = jax.lax.optimization_barrier((w, grads, state))
        w, opt_state = mpjax.apply_gradients(tx, grads, opt_state, w)
        return w, opt_state, state

    arguments = w, tx.init(w), watched.init(w, X), X
    text = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*arguments).compile().as_text()
    assert "conditional(" in text
    assert not re.search(r"= f32\[16,16\]\S* copy\(", text)


def test_wrong_calls_say_what_is_wrong():
    with pytest.raises(ValueError, match="watch: every=0"):
        mpjax.watch(loss_fn, every=0)
    watched = mpjax.watch(lambda w, x: jnp.sum(jax.named_call(jnp.dot, name="deep" if x.ndim > 1 else "flat")(x, w)))
    with pytest.raises(ValueError, match=r"modules \(deep \(forward\)"):
        watched.update(watched.init(jnp.ones(16), X[0]), jnp.ones(16), X)
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    state = watched.init(jnp.ones(16), X)
    inside = jax.shard_map(
        lambda x: watched.update(state, jnp.ones(16), x).step, mesh=mesh, in_specs=jax.P("batch"), out_specs=jax.P()
    )
    with pytest.raises(ValueError, match="inside of a shard_map"):
        inside(X)
