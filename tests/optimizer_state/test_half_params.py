"""Half params without masters: sums stay accurate, whatever the optimizer is wrapped in."""

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
FORMS = list(zip(["update", "apply"], HALVES, strict=True))
WRAPPERS = {"stochastic_rounding": mpjax.stochastic_rounding, "kahan": mpjax.kahan}


def step_by(tx, form):
    return jax.jit(functools.partial(updated, tx, form))


@pytest.mark.parametrize(("form", "half"), FORMS)
def test_a_million_stochastic_steps_have_the_right_mean(half, form):
    n, spacing = 10**6, float(jnp.finfo(half).eps)
    tx = mpjax.stochastic_rounding(optax.sgd(1.0))
    params = np.ones(n, half)
    params, _ = step_by(tx, form)(np.full(n, -spacing / 3, np.float32), tx.init(params), params)
    assert params.dtype == half
    mean = np.asarray(params, np.float64).mean()
    assert abs(mean - (1 + spacing / 3)) < 4 * spacing * (2 / 9) ** 0.5 / n**0.5


@pytest.mark.parametrize("form", ["update", "apply"])
@pytest.mark.parametrize("half", HALVES)
def test_kahan_sum_is_the_float64_sum_rounded(half, form):
    nmant = int(jnp.finfo(half).nmant)
    rng = np.random.default_rng(0)
    tx = mpjax.kahan(optax.sgd(1.0))
    # Float16 params from its smallest normal number up, both signs.
    start = rng.choice([-1, 1], 4096) * 2.0 ** rng.uniform(-14, 4, 4096)
    params = start.astype(jnp.dtype(half))
    exact = np.asarray(params, np.float64)
    state, step, n = tx.init(params), step_by(tx, form), 64
    size = np.abs(exact) * 2.0**-nmant
    reached = np.abs(exact)
    for _ in range(n):  # each about a quarter of a spacing
        update = (rng.normal(size=4096) * size / 4).astype(np.float32)
        params, state = step(-update, state, params)
        exact = exact + update
        reached = np.maximum(reached, np.abs(exact))
    # Each step rounds the compensation, at most half a spacing, by at most 2**(-nmant - 1) of it; six sigma of n.
    bound = 6 * (n / 3) ** 0.5 * reached * 2.0 ** (-2 * nmant - 2)
    np.testing.assert_array_less(np.abs(_kahan_value(params, state, half) - exact), bound)
    # So the param is the float64 sum rounded, except where the sum is that close to the middle of two numbers.
    low, high = ((exact + sign * bound).astype(np.float32).astype(jnp.dtype(half)) for sign in (-1, 1))
    clear = low == high
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(np.asarray(params)[clear], low[clear])


@pytest.mark.parametrize(("form", "half"), FORMS)
def test_kahan_forgets_the_error_of_a_param_that_was_changed_outside(half, form):
    tx = mpjax.kahan(optax.sgd(1.0))
    params = np.full(2, 1000, half)  # whose rounding errors, of 0.2, are larger than the params of the checkpoint
    step = step_by(tx, form)
    params, state = step(np.full(2, -0.2, np.float32), tx.init(params), params)
    loaded = np.asarray([0.01, float(params[1])], half)
    reached, state = step(np.zeros(2, np.float32), state, loaded)
    np.testing.assert_array_equal(reached, loaded)
    np.testing.assert_allclose(_kahan_value(reached, state, half), [float(loaded[0]), 1000.2], rtol=1e-5)


def _kahan_value(params, state, half):
    scale = 2.0 ** (int(jnp.finfo(half).nmant) + 1)
    return np.asarray(params, np.float64) + np.asarray(state.compensation, np.float64) / scale


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_float32_params_are_updated_as_usual(wrapper):
    inner = optax.adamw(1e-2)
    tx = wrapper(inner)
    norm = np.linspace(0.1, 1, 4, dtype=np.float32)
    params = {"w": np.ones(4, jnp.bfloat16), "norm": norm}
    wide = {"w": np.ones(4, np.float32), "norm": norm}
    grads = {"w": np.ones(4, np.float32), "norm": np.arange(4, dtype=np.float32)}
    first_step = lambda tx, params: mpjax.apply_gradients(tx, grads, tx.init(params), params)
    expected, _ = arrays_in_numpy(functools.partial(first_step, inner))(wide)
    new, state = arrays_in_numpy(functools.partial(first_step, tx))(params)
    np.testing.assert_array_equal(new["norm"], expected["norm"])
    assert {x.dtype for x in jax.tree.leaves(state.inner_state) if x.ndim} == {jnp.dtype("float32")}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_a_zero_update_changes_no_param(wrapper):
    tx = wrapper(optax.sgd(1.0))
    params = np.random.default_rng(0).normal(size=4096).astype(jnp.bfloat16)
    step = arrays_in_numpy(lambda p: mpjax.apply_gradients(tx, np.zeros(4096, np.float32), tx.init(p), p))
    new, _ = step(params)
    np.testing.assert_array_equal(new, params)


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_missing_params_are_reported(wrapper):
    tx = wrapper(optax.sgd(1.0))
    half = {"w": np.ones(3, jnp.bfloat16)}
    with pytest.raises(ValueError, match="needs the params"):
        tx.update(half, tx.init(half))
    with pytest.raises(TypeError, match="optax"):
        wrapper("adam")


def test_kahan_reports_params_cast_after_init():
    tx = mpjax.kahan(optax.sgd(1.0))
    half, full = {"w": np.ones(3, jnp.bfloat16)}, {"w": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"w is bfloat16.*no compensation.*tx\.init"):
        tx.update(full, tx.init(full), half)
    with pytest.raises(ValueError, match=r"w is float32.*a compensation.*tx\.init"):
        tx.update(full, tx.init(half), full)


def test_steps_arrays_and_seeds_have_separate_random_numbers():
    ones = {k: np.ones(4096, jnp.bfloat16) for k in "ab"}
    grads = {k: np.full(4096, -(2.0**-8), np.float32) for k in "ab"}

    step = step_by(mpjax.stochastic_rounding(optax.sgd(1.0)), "apply")  # only the state contains the seed

    def moved(seed, steps=1):
        params, state = ones, mpjax.stochastic_rounding(optax.sgd(1.0), seed=seed).init(ones)
        for _ in range(steps):
            previous = params
            params, state = step(grads, state, params)
        return {k: np.asarray(params[k]) != np.asarray(previous[k]) for k in "ab"}

    first = moved(0)
    for other in (first["b"], moved(0, steps=2)["a"], moved(1)["a"], moved(jax.random.key(5))["a"]):
        assert abs((first["a"] == other).mean() - 0.5) < 0.05
    np.testing.assert_array_equal(first["a"], moved(0)["a"])
