"""Flax's FP8 layers return new values as gradients: they are used unchanged. Float8 gradients never become NaN."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

import mpjax
from testing import cheap_keys
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy

KEY = "_overwrite_with_gradient"
X, BAD = (np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32) for _ in range(2))
BAD[0, 0] = np.inf
Y = np.tanh(X[:, :1])
MODEL = nn.Dense(16, dot_general_cls=fp8_ops.Fp8DotGeneralOp)


@pytest.fixture(scope="module")
def variables():
    return arrays_in_numpy(MODEL.init)(cheap_keys.key(0), X)


@pytest.fixture(scope="module")
def grads(variables):
    return arrays_in_numpy(jax.grad(loss_fn))(variables)


def loss_fn(variables, x=X):
    return jnp.mean((MODEL.apply(variables, x) - Y) ** 2)


@functools.cache
def start_and_step(form):
    """A function that makes a form's state of variables, and its step, which is traced once."""
    tx = mpjax.dynamic_loss_scale(optax.adam(1e-2), growth_interval=3)

    def start(variables):
        if form == "apply_gradients":
            return variables, tx.init(variables)
        optimizer = optax.adam(1e-2) if form == "plain" else tx
        return TrainState.create(apply_fn=MODEL.apply, params=variables, tx=optimizer)

    @arrays_in_numpy
    def step(carry, x):
        if form == "plain":
            return carry.apply_gradients(grads=jax.grad(loss_fn)(carry.params, x))
        if form == "TrainState":
            return carry.apply_gradients(grads=jax.grad(mpjax.scale_loss(loss_fn, carry))(carry.params, x))
        if form == "apply_gradients of a TrainState":
            loss, grads = mpjax.value_and_grad(loss_fn, carry)(carry.params, x)
            return mpjax.apply_gradients(carry, grads, value=loss)
        variables, opt_state = carry
        loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(variables, x)
        return mpjax.apply_gradients(tx, grads, opt_state, variables, value=loss)

    return start, step


def run(variables, form, xs):
    """The variables after steps on `xs`."""
    start, step = start_and_step(form)
    carry = start(variables)
    for x in xs:
        carry = step(carry, x)
    return carry[0] if form == "apply_gradients" else carry.params


@pytest.mark.parametrize("form", ["TrainState", "apply_gradients", "apply_gradients of a TrainState"])
def test_values_of_the_collection_are_those_without_loss_scaling(variables, form):
    expected, found = run(variables, "plain", [X] * 4), run(variables, form, [X] * 4)
    for name, value in expected[KEY]["Fp8DotGeneralOp_0"].items():
        # The scale changed after the third step, so it is the fourth whose gradients' history is scaled by it.
        factor = 2.0**15 if name.startswith("output_grad") else 1.0
        scaled = np.asarray(found[KEY]["Fp8DotGeneralOp_0"][name])
        np.testing.assert_allclose(scaled[scaled > 0].min() / factor, np.min(value[value > 0]), rtol=0.5)
        if factor == 1.0:
            np.testing.assert_allclose(scaled, value, rtol=2e-2)
    np.testing.assert_allclose(found["params"]["kernel"], expected["params"]["kernel"], atol=2e-2)


@pytest.mark.parametrize("form", ["apply_gradients", "apply_gradients of a TrainState"])
def test_apply_gradients_keeps_the_collection_on_a_skipped_step(variables, form):
    before = run(variables, form, [X])
    after = run(variables, form, [X, BAD])
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_an_overflow_that_only_the_collection_shows_is_skipped(variables, grads):
    # Quantizing clips to float8's range, so the gradients can stay finite where the amax is not.
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    state = tx.init(variables)
    grads = {**grads, KEY: jax.tree.map(lambda g: np.full(g.shape, np.inf, g.dtype), grads[KEY])}
    new, state = arrays_in_numpy(lambda *args: mpjax.apply_gradients(tx, *args))(grads, state, variables)
    assert not state.last_finite
    jax.tree.map(np.testing.assert_array_equal, new, variables)


@pytest.mark.parametrize("kind", [dict, freeze])
@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: mpjax.master_weights(tx, "O2")])
def test_plain_optimizers_and_master_weights_take_the_values_too(variables, grads, kind, wrap):
    tx = wrap(optax.sgd(0.1))
    variables, grads = kind(variables), kind(grads)
    step = arrays_in_numpy(lambda *args: mpjax.apply_gradients(tx, *args))
    new, _ = step(grads, tx.init(variables), variables)
    assert type(new) is type(variables)
    jax.tree.map(np.testing.assert_array_equal, new[KEY], grads[KEY])
    kernel, gradient, found = (np.asarray(tree["params"]["kernel"], np.float64) for tree in (variables, grads, new))
    np.testing.assert_allclose(found, kernel - 0.1 * gradient, rtol=1e-6)


def test_unscale_keeps_the_collection_and_update_refuses_it(variables, grads):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    state = tx.init(variables)
    unscaled = in_numpy(lambda grads: mpjax.unscale(grads, state))(grads)
    jax.tree.map(np.testing.assert_array_equal, unscaled[KEY], grads[KEY])
    np.testing.assert_array_equal(unscaled["params"]["bias"], np.asarray(grads["params"]["bias"]) / 2.0**15)
    with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*mpjax\.apply_gradients"):
        tx.update(grads, state, variables)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_gradients_at_float8_leaves_are_true_at_any_scale(dtype):
    loss = lambda w: jnp.sum(w.astype(jnp.float32) * np.array([1.0, 3.0], np.float32))
    states = [mpjax.static_loss_scale(optax.sgd(0.1), scale).init({}) for scale in (2.0**15, 2.0**-10)]

    @jax.jit
    def run(w, large):
        return [mpjax.grad(loss, state)(w) for state in states], mpjax.unscale(large, states[1])

    large = np.array([3.0, np.nan], dtype)
    by_scale, unscaled = run(np.array([0.5, 1.0], dtype), large)
    assert {g.dtype for g in jax.tree.leaves((by_scale, unscaled))} == {jnp.dtype(dtype)}
    for grads in by_scale:
        np.testing.assert_array_equal(np.asarray(grads, np.float32), [1.0, 3.0])
    largest, nonfinite = np.asarray(unscaled, np.float32)
    assert largest == min(3072.0, float(jnp.finfo(dtype).max))
    assert not np.isfinite(nonfinite)
    with pytest.raises(TypeError, match=r"float8.*mpjax\.value_and_grad"):
        jax.eval_shape(jax.grad(mpjax.scale_loss(loss, states[0])), np.array([0.5, 1.0], dtype))
