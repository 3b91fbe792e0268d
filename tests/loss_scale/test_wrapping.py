"""Transformations around and inside loss scaling, and arguments in the wrong place."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
from testing.random_programs.evaluate import arrays_in_numpy
from tests.updates import updated

PARAMS = {"w": np.ones(2, np.float32)}
GOOD = {"w": np.ones(2, np.float32)}
BAD = {"w": np.array([1.0, np.nan], np.float32)}
LOSS = lambda p: jnp.sum(p["w"])


OPTIMIZER = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)


def scaled(inner=None):
    return mpjax.dynamic_loss_scale(optax.sgd(0.1) if inner is None else inner)


def then_scaled(rounding):
    return scaled(optax.chain(rounding(optax.adam(1.0)), optax.scale(-1.0)))


@pytest.mark.standard_promotion  # in optax.MultiSteps
@pytest.mark.parametrize(
    ("wrapped", "says"),
    [
        (lambda: optax.apply_if_finite(scaled(), 5), "apply_if_finite"),
        (lambda: optax.chain(optax.apply_if_finite(scaled(), 5)), "apply_if_finite"),
        (lambda: optax.MultiSteps(scaled(), 2).gradient_transformation(), "MultiSteps"),
        (lambda: optax.chain(optax.clip(1.0), scaled()), "in front of it.*Wrap the whole chain"),
        (lambda: optax.chain(optax.chain(optax.zero_nans(), optax.sgd(1.0)), scaled()), "in front of it.*zero_nans"),
        (lambda: optax.chain(scaled(), optax.add_decayed_weights(0.1)), "behind it.*weight decay"),
        (lambda: optax.masked(scaled(), {"w": True}), "one group"),
        (lambda: optax.multi_transform({"a": scaled(), "b": optax.sgd(0.1)}, {"w": "a"}), "one group"),
        (lambda: then_scaled(mpjax.master_weights), "master_weights is followed"),
        (lambda: then_scaled(mpjax.kahan), "kahan is followed"),
        (lambda: then_scaled(mpjax.stochastic_rounding), "stochastic_rounding is followed"),
    ],
)
def test_orders_that_break_a_transformation_warn_before_the_first_step(wrapped, says):
    tx = wrapped()
    state = tx.init(PARAMS)
    with pytest.warns(mpjax.LossScaleWarning, match=says):
        mpjax.value_and_grad(LOSS, state)
    with pytest.warns(mpjax.LossScaleWarning, match=says):
        mpjax.check_progress(state)
    with pytest.warns(mpjax.LossScaleWarning, match=says):
        jax.eval_shape(lambda grads: mpjax.apply_gradients(tx, grads, state, PARAMS), GOOD)


def rounded_then_scaled(rounding, chain=optax.chain):
    return chain(rounding(optax.scale_by_adam()), optax.scale_by_learning_rate(1e-2))


def named_chain(*transformations):
    return optax.named_chain(*zip("zyx", transformations, strict=False))


@pytest.mark.parametrize(
    ("tx", "says"),
    [
        (rounded_then_scaled(mpjax.master_weights), "master_weights is followed"),
        (rounded_then_scaled(mpjax.kahan), "kahan is followed"),
        (rounded_then_scaled(mpjax.stochastic_rounding, named_chain), "stochastic_rounding is followed"),
        (
            optax.inject_hyperparams(lambda rate: optax.chain(mpjax.kahan(optax.adam(rate)), optax.scale(rate)))(1.0),
            "kahan is followed",
        ),
        (named_chain(scaled(), optax.add_decayed_weights(0.1)), "behind it"),
    ],
)
def test_apply_gradients_alone_warns_of_a_wrong_order(tx, says):
    state = tx.init(PARAMS)
    with pytest.warns(mpjax.LossScaleWarning, match=says):
        jax.eval_shape(lambda grads: mpjax.apply_gradients(tx, grads, state, PARAMS), GOOD)


def test_a_copy_with_another_update_is_not_bypassed():
    tx = scaled()
    doubled = tx._replace(update=lambda grads, *rest, **extra: tx.update(jax.tree.map(lambda g: 2 * g, grads), *rest))
    params, _ = mpjax.apply_gradients(doubled, GOOD, tx.init(PARAMS), PARAMS)
    once, _ = mpjax.apply_gradients(tx, GOOD, tx.init(PARAMS), PARAMS)
    np.testing.assert_allclose(params["w"] - PARAMS["w"], 2 * (once["w"] - PARAMS["w"]), rtol=1e-6)


def test_an_optimizer_that_is_scaled_twice_is_refused():
    with pytest.raises(ValueError, match="has a loss scale already"):
        scaled(optax.chain(optax.clip(1.0), scaled())).init(PARAMS)


@pytest.mark.standard_promotion  # in optax.MultiSteps
@pytest.mark.parametrize(
    "legitimate",
    [
        lambda: optax.multi_transform({"a": scaled(), "b": optax.set_to_zero()}, {"w": "a"}),
        lambda: scaled(optax.chain(optax.clip(1.0), mpjax.kahan(optax.adam(1.0)))),
        lambda: scaled(optax.chain(optax.zero_nans(), optax.sgd(0.1))),
        lambda: scaled(optax.MultiSteps(optax.sgd(0.1), 2)),
        lambda: scaled(optax.apply_if_finite(optax.sgd(0.1), 2)),
    ],
)
def test_the_same_transformations_elsewhere_are_legitimate(legitimate):
    tx = legitimate()
    state = tx.init(PARAMS)
    jax.eval_shape(mpjax.value_and_grad(LOSS, state), PARAMS)
    jax.eval_shape(tx.update, GOOD, state, PARAMS)


def test_apply_gradients_takes_a_train_state_and_tells_a_bad_loss_from_an_overflow():
    start = TrainState.create(apply_fn=None, params=PARAMS, tx=scaled(optax.adam(0.1)))
    step = arrays_in_numpy(lambda state, grads, loss: mpjax.apply_gradients(state, grads, value=loss))
    taken = step(start, GOOD, np.float32(1))
    skipped = step(taken, GOOD, np.float32(np.nan))
    overflowed = step(skipped, {"w": np.full_like(PARAMS["w"], np.inf)}, np.float32(1))
    assert [int(s.step) for s in (taken, skipped, overflowed)] == [1, 2, 3]
    assert [int(s.opt_state.nonfinite_losses) for s in (taken, skipped, overflowed)] == [0, 1, 1]
    assert [float(s.opt_state.loss_scale) for s in (taken, skipped, overflowed)] == [2.0**15, 2.0**15, 2.0**14]
    params, _ = arrays_in_numpy(lambda: mpjax.apply_gradients(start.tx, GOOD, start.opt_state, PARAMS))()
    jax.tree.map(np.testing.assert_array_equal, taken.params, params)
    jax.tree.map(np.testing.assert_array_equal, overflowed.params, params)


def test_replaced_functions_are_the_ones_that_run():
    tx = scaled()
    seen = []

    @functools.wraps(tx.update)
    def update(*args, **kwargs):
        seen.append(1)
        return tx.update(*args, **kwargs)

    for replaced in (tx._replace(update=update), tx._replace(init=tx.init), optax.GradientTransformationExtraArgs(*tx)):
        step = arrays_in_numpy(lambda tx=replaced: mpjax.apply_gradients(tx, BAD, tx.init(PARAMS), PARAMS))
        params, state = step()
        np.testing.assert_array_equal(params["w"], PARAMS["w"])
        assert int(state.skipped_steps) == 1
    assert seen == [1]


def test_arguments_in_another_order_raise_a_one_line_error():
    tx = scaled()
    state = tx.init(PARAMS)
    wrong = {
        "as grads": lambda: mpjax.apply_gradients(tx, state, GOOD, PARAMS),
        "as params": lambda: mpjax.apply_gradients(tx, GOOD, PARAMS, state),
        r"apply_gradients\(state, grads, value=loss\); got it": lambda: mpjax.apply_gradients(
            tx, GOOD, TrainState.create(apply_fn=None, params=PARAMS, tx=tx), PARAMS
        ),
        "params are missing": lambda: mpjax.apply_gradients(tx, GOOD, state),
        r"optimizer.update\(model, grads, value=loss\)": lambda: mpjax.apply_gradients(OPTIMIZER, GOOD, value=1.0),
        r"grads is a pair.*give the second": lambda: mpjax.apply_gradients(tx, (1.0, GOOD), state, PARAMS),
        r"outside of jit": lambda: jax.eval_shape(mpjax.check_progress, state),
        r"a dict came first": lambda: mpjax.value_and_grad(PARAMS, state),
        r"a LossScaleState came first": lambda: mpjax.grad(state, LOSS),
        "loss function returned None": lambda: mpjax.grad(lambda p: None, state)(PARAMS),
        "b/n of argument 0 is int32": lambda: mpjax.grad(LOSS)({**PARAMS, "b": {"n": np.int32(1)}}),
        "all of argument 1 is int32": lambda: mpjax.grad(LOSS, argnums=1)(PARAMS, 1),
        "is a dict": lambda: tx.update(GOOD, PARAMS, PARAMS),
        "v of grads is not in params": lambda: mpjax.apply_gradients(tx, {**GOOD, "v": GOOD["w"]}, state, PARAMS),
        r"static_loss_scale\(tx, 128.0\)": lambda: mpjax.static_loss_scale(128.0, optax.sgd(0.1)),
        r"loss_scale_for\(tx, 'O2'\)": lambda: mpjax.loss_scale_for("O2", optax.sgd(0.1)),
        r"master_weights\(tx, 'O2'\)": lambda: mpjax.master_weights("O2", optax.sgd(0.1)),
        "got 32768": lambda: mpjax.dynamic_loss_scale(2.0**15),
    }
    for says, call in wrong.items():
        with pytest.raises((TypeError, ValueError), match=says) as error:
            call()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("rounding", [lambda tx: tx, lambda tx: mpjax.master_weights(tx, "O2")])
@pytest.mark.parametrize("way", ["update", "apply"])
def test_a_state_whose_shapes_broadcast_to_other_params_is_refused(way, rounding):
    tx = scaled(rounding(optax.adam(0.1)))
    with pytest.raises(ValueError, match=r"opt_state is of other params: the update of 'w' has shape \(3, 2\)"):
        jax.eval_shape(lambda: updated(tx, way, GOOD, tx.init({"w": np.ones((3, 2), np.float32)}), PARAMS))


def test_progress_stops_where_a_compiled_gradient_keeps_the_first_scale():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0**4)
    state = tx.init(PARAMS)
    gradient = jax.jit(mpjax.grad(lambda p: jnp.sum(p["w"].astype(jnp.float16)) * 2.0**14, state))
    for _ in range(11):
        _, state = mpjax.apply_gradients(tx, gradient(PARAMS), state, PARAMS)
    with pytest.raises(mpjax.LossScaleError, match="another optimizer, or one that a jitted function closes over"):
        mpjax.check_progress(state, max_consecutive_skips=10)


def test_numpy_numbers_are_accepted():
    kinds = {"growth_interval": np.int64(5), "hysteresis": np.int32(2), "init_scale": np.float32(8.0)}
    assert float(mpjax.dynamic_loss_scale(optax.sgd(0.1), **kinds).init(PARAMS).loss_scale) == 8.0
    assert float(mpjax.static_loss_scale(optax.sgd(0.1), np.int64(8)).init(PARAMS).loss_scale) == 8.0
    with pytest.raises(ValueError, match="growth_interval=True"):
        mpjax.dynamic_loss_scale(optax.sgd(0.1), growth_interval=True)


@pytest.mark.standard_promotion  # optax.contrib.sam multiplies a comparison of counts
def test_extra_arguments_go_only_to_inner_transformations_that_take_them():
    sam = optax.contrib.sam(optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2)
    tx = scaled(sam)
    state, params = tx.init(PARAMS), PARAMS
    plain_state, plain = sam.init(PARAMS), PARAMS

    @arrays_in_numpy
    def step(state, params, plain_state, plain):
        scaled = mpjax.apply_gradients(tx, GOOD, state, params, value=np.float32(1), temperature=2.0)
        return scaled, mpjax.apply_gradients(sam, GOOD, plain_state, plain)

    for _ in range(4):
        (params, state), (plain, plain_state) = step(state, params, plain_state, plain)
    np.testing.assert_allclose(params["w"], plain["w"], rtol=1e-6)
    seen = {}

    def update(updates, state, params=None, *, temperature):
        seen["temperature"] = temperature
        return updates, state

    takes_one = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = scaled(takes_one)
    jax.eval_shape(lambda: tx.update(GOOD, tx.init(PARAMS), PARAMS, value=1.0, temperature=2.0))
    assert seen == {"temperature": 2.0}


@pytest.mark.standard_promotion  # optax.apply_updates adds float32 updates to half params
@pytest.mark.parametrize(
    ("half", "inner", "form"),
    [
        ("float16", optax.adam(1e-2), "update"),
        ("bfloat16", optax.sgd(1e-2, momentum=0.9), "apply"),
        ("bfloat16", optax.lamb(1e-2), "update"),
    ],
)
def test_half_params_without_masters_train_in_one_trace_and_warn(half, inner, form):
    tx, params, traces = mpjax.dynamic_loss_scale(inner, init_scale=2.0**8), {"w": np.ones(3, half)}, []
    with pytest.warns(mpjax.LossScaleWarning, match=rf"w\) are half \({half}\).*master_weights"):
        state = tx.init(params)
    floats = {x.dtype for x in jax.tree.leaves(state.inner_state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats == {jnp.dtype("float32")}

    @arrays_in_numpy
    def step(params, state, x):
        traces.append(1)
        grads = mpjax.grad(lambda p: jnp.sum(p["w"].astype(jnp.float32) ** 2) * x, state)(params)
        return updated(tx, form, grads, state, params)

    with warnings.catch_warnings():  # of each init, not of each step
        warnings.simplefilter("error")
        for x in (1.0, np.inf, 1.0):
            params, state = step(params, state, np.float32(x))
    assert (len(traces), int(state.skipped_steps)) == (1, 1)
    assert params["w"].dtype == half
    assert float(params["w"][0]) < 1


def test_masters_and_float32_params_do_not_warn():
    params = {"w": np.ones(3, np.float16)}
    for inner in (mpjax.master_weights(optax.adam(1e-2)), optax.chain(mpjax.master_weights(optax.adam(1e-2)))):
        assert scaled(inner).init(params).inner_state is not None
