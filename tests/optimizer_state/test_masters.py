"""Master weights: half params follow a float32 copy exactly, and training equals float32 training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from testing.random_programs.evaluate import arrays_in_numpy
from tests.updates import updated

HALVES = ["float16", "bfloat16"]


def policy_of(half):
    return mpjax.Policy(half, half, "float32")


def assert_params_are_rounded_masters(params, state):
    for p, m in zip(jax.tree.leaves(params), jax.tree.leaves(state.master), strict=True):
        np.testing.assert_array_equal(np.asarray(p), np.asarray(m).astype(p.dtype))


@pytest.mark.standard_promotion  # optax.apply_updates adds float32 updates to half params
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("form", ["update", "apply"])
def test_params_equal_the_cast_master_after_updates_of_every_size(half, form):
    tx, rng = mpjax.master_weights(optax.sgd(1.0), policy_of(half)), np.random.default_rng(0)
    params = {"w": (rng.normal(size=4096) * 10).astype(half)}
    state = tx.init(params)

    step = jax.jit(functools.partial(updated, tx, form))

    for i in range(8):
        # From far below half's spacing to steps that shrink a param by 2**20 or change its sign.
        previous = np.asarray(state.master["w"])
        grads = previous * np.float32(1 - 2.0**-20) if i % 4 == 3 else np.float32(2.0 ** rng.uniform(-30, 6, 4096))
        params, state = step({"w": grads}, state, params)
        assert params["w"].dtype == jnp.dtype(half)
        assert_params_are_rounded_masters(params, state)
        # The master is the float32 sum, except for float32's own rounding at the size of the step.
        expected = previous.astype(np.float64) - grads
        largest = np.abs(previous) + np.abs(grads)
        assert np.all(np.abs(state.master["w"] - expected) <= 2 * np.finfo(np.float32).eps * largest)


@pytest.mark.standard_promotion  # the same
@pytest.mark.parametrize("half", HALVES)
def test_a_master_that_no_update_reaches_takes_the_sum(half):
    # The param is rounded up to 16 from the float32 number below it, whose spacing is half as large; the step ends at
    # an odd multiple of that spacing on the other side of zero.
    tx, spacing = mpjax.master_weights(optax.sgd(1.0), policy_of(half)), np.float32(2.0**-20)
    params, master = {"w": np.full(1, 16, half)}, {"w": np.full(1, 16 - spacing, np.float32)}
    state = tx.init(params)._replace(master=master)
    updates, state = arrays_in_numpy(tx.update)({"w": master["w"] + 13 * spacing}, state, params)
    assert np.abs(state.master["w"] + 13 * spacing) == spacing
    params = arrays_in_numpy(optax.apply_updates)(params, updates)
    assert_params_are_rounded_masters(params, state)


@pytest.mark.standard_promotion  # the same
@pytest.mark.parametrize("form", ["update", "apply"])
@pytest.mark.parametrize("half", HALVES)
def test_params_that_were_changed_outside_are_adopted(half, form):
    # The others keep masters that differ from them by less than half a unit: also a subnormal one.
    tx = mpjax.master_weights(optax.sgd(0.5), policy_of(half))
    masters = np.float32([1.0, 3e-7, 1 + 1e-5, -1e3])
    params = {"w": masters.astype(half)}
    state = tx.init(params)._replace(master={"w": masters})

    step = jax.jit(functools.partial(updated, tx, form, {"w": np.full(4, 1e-6, np.float32)}))

    _, kept = step(state, params)
    params["w"][0] = 7.0
    params, state = step(state, params)
    np.testing.assert_array_equal(state.master["w"], np.float32([7.0 - 0.5e-6, *kept.master["w"][1:]]))
    np.testing.assert_array_equal(kept.master["w"], masters - np.float32(0.5e-6))
    assert params["w"][0] == 7


def test_float32_leaves_are_their_own_masters():
    ones = np.ones(3, np.float32)
    params = mpjax.get_policy("O2").cast_to_param({"Dense_0": ones, "BatchNorm_0": ones})
    tx = mpjax.master_weights(optax.adam(1e-2), "O2")
    state = tx.init(params)
    assert isinstance(state.master["BatchNorm_0"], optax.MaskedNode)
    grads = jax.tree.map(lambda p: ones, params)
    params, state = arrays_in_numpy(lambda *args: mpjax.apply_gradients(tx, *args))(grads, state, params)
    np.testing.assert_array_equal(params["BatchNorm_0"], state.master["Dense_0"])
    assert params["BatchNorm_0"].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(state.inner_state) if x.ndim} == {jnp.dtype("float32")}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "O1"])
def test_policy_without_half_params_returns_the_optimizer_unchanged(policy):
    inner = optax.adam(1e-3)
    assert mpjax.master_weights(inner, policy) is inner


@pytest.mark.parametrize("policy", ["O2", "O3", "p=bf16"])
def test_masters_of_float32_params_keep_every_bit(policy):
    """The way from a float32 checkpoint to half params."""
    policy, rng = mpjax.get_policy(policy), np.random.default_rng(0)
    saved = {"w": rng.normal(size=(64, 4)).astype("float32"), "LayerNorm_0": {"scale": np.full(4, 1 / 3, np.float32)}}
    tx = mpjax.dynamic_loss_scale(mpjax.master_weights(optax.sgd(1.0), policy))
    params, state = policy.cast_to_param(saved), tx.init(saved)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    np.testing.assert_array_equal(state.inner_state.master["w"], saved["w"])
    step = np.float32(2.0**-14)
    grads = jax.tree.map(lambda x: np.full(x.shape, step), saved)
    new, state = mpjax.apply_gradients(tx, grads, state, params)
    np.testing.assert_array_equal(state.inner_state.master["w"], saved["w"] - step)
    np.testing.assert_array_equal(new["w"], (saved["w"] - step).astype(params["w"].dtype))
    # Params that stay float32 are their own masters.
    same, state = mpjax.apply_gradients(tx, grads, tx.init(saved), saved)
    np.testing.assert_array_equal(same["w"], saved["w"] - step)
    np.testing.assert_array_equal(state.inner_state.master["w"], same["w"])


def test_params_of_another_policy_and_missing_params_are_reported():
    tx = mpjax.master_weights(optax.sgd(0.1), mpjax.Policy("float16", "float16", "float16", [("*/w", "float32")]))
    state = tx.init({"w": np.ones(3, np.float32)})
    half = {"w": np.ones(3, np.float16)}
    with pytest.raises(ValueError, match=r"w is float16.*no master copy.*tx\.init"):
        tx.update(half, state, half)
    with pytest.raises(ValueError, match="params"):
        tx.update(half, tx.init(half))
    with pytest.raises(ValueError, match="mixed_float16"):
        mpjax.master_weights(optax.sgd(0.1), "O7")


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="with several devices, XLA would gather what this saves")
@pytest.mark.standard_promotion  # optax.apply_updates adds float32 updates to half params
@pytest.mark.parametrize("donate", [True, False])
def test_a_scaled_update_stores_no_updates_beside_the_masters(donate):
    tx = mpjax.dynamic_loss_scale(mpjax.master_weights(optax.adam(1e-3), "O3"))
    layers, width = 4, 256
    unit = 4 * layers * width**2  # bytes of the float32 parameters

    def loss(params, x):
        for w in params:
            x = jax.nn.relu(x.astype(jnp.float16) @ w)
        return jnp.mean(x.astype(jnp.float32))

    def step(params, state, x):
        grads = mpjax.grad(loss, state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = [jax.ShapeDtypeStruct((width, width), jnp.float16)] * layers
    args = params, jax.eval_shape(tx.init, params), np.ones((2, width), np.float32)
    compiled = jax.jit(step, donate_argnums=(0, 1) if donate else ()).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2.05 * unit


def test_a_skipped_update_is_zero_even_if_the_params_were_changed():
    tx = mpjax.dynamic_loss_scale(mpjax.master_weights(optax.sgd(0.1), "O3"))
    state = tx.init({"w": np.ones(3, np.float16)})
    changed = {"w": np.full(3, 2.0, np.float16)}
    updates, after = arrays_in_numpy(tx.update)({"w": np.full(3, np.nan, np.float32)}, state, changed)
    np.testing.assert_array_equal(updates["w"], 0)
    np.testing.assert_array_equal(after.inner_state.master["w"], state.inner_state.master["w"])
