"""Loss scaling that nothing uses: an optimizer with a loss scale, and gradients that were not scaled."""

import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax

PARAMS, X = {"w": np.ones((2, 2), np.float32)}, np.ones((4, 2), np.float32)
MISSED = r"mpjax did not scale the gradient in this program.*mpjax\.value_and_grad"


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def plain(params, state, x):
    return jax.grad(loss_fn)(params, x)


GRADIENTS = {
    "jax.grad": plain,
    "mpjax.grad": lambda params, state, x: mpjax.grad(loss_fn, state)(params, x),
    "scale_loss": lambda params, state, x: jax.grad(mpjax.scale_loss(loss_fn, state))(params, x),
    "unscale": lambda params, state, x: mpjax.unscale(plain(params, state, x), state),
}


def step_of(tx, gradient, form="update"):
    def step(params, state, x):
        grads = gradient(params, state, x)
        if form == "apply_gradients":
            return mpjax.apply_gradients(tx, grads, state, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def run(tx, gradient, form="update"):
    jax.eval_shape(step_of(tx, gradient, form), PARAMS, tx.init(PARAMS), X)


@pytest.mark.parametrize("form", ["update", "apply_gradients"])
def test_an_update_in_a_program_whose_gradient_nothing_scaled_warns(form):
    run(mpjax.dynamic_loss_scale(optax.sgd(0.1)), GRADIENTS["mpjax.grad"])  # in another program
    with pytest.warns(mpjax.LossScaleWarning, match=MISSED) as caught:
        run(mpjax.dynamic_loss_scale(optax.sgd(0.1)), plain, form)
    assert caught[0].filename == __file__


def test_what_a_process_did_before_changes_no_warning():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    state = tx.init(PARAMS)  # a restored state has no `init` in its process
    for _ in range(2):
        mpjax.scale_loss(loss_fn, state)
        with pytest.warns(mpjax.LossScaleWarning, match=MISSED):
            jax.eval_shape(step_of(mpjax.dynamic_loss_scale(optax.sgd(0.1)), plain), PARAMS, state, X)


def test_a_gradient_inside_a_scan_or_a_remat_is_seen():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))

    def step(gradient, params, state, xs):
        body = lambda total, x: (jax.tree.map(jnp.add, total, gradient(params, state, x)), None)
        grads, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), xs)
        return tx.update(grads, state, params)

    with warnings.catch_warnings(action="error"):
        jax.eval_shape(lambda *args: step(GRADIENTS["mpjax.grad"], *args), PARAMS, tx.init(PARAMS), X[None])
    with pytest.warns(mpjax.LossScaleWarning, match=MISSED):
        jax.eval_shape(lambda *args: step(plain, *args), PARAMS, tx.init(PARAMS), X[None])


def test_nnx_and_train_states_warn_as_well():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.warns(mpjax.LossScaleWarning, match=MISSED):
        nnx.jit(lambda m, o: o.update(m, nnx.grad(lambda m: jnp.mean(m(X)))(m)))(model, optimizer)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with pytest.warns(mpjax.LossScaleWarning, match=MISSED):
        jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss_fn)(state.params, X)))(state)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("gradient", ["mpjax.grad", "scale_loss", "unscale"])
def test_scaled_gradients_do_not_warn(gradient):
    run(mpjax.dynamic_loss_scale(optax.sgd(0.1)), GRADIENTS[gradient])


@pytest.mark.filterwarnings("error")
def test_scales_of_1_and_gradients_scaled_by_hand_do_not_warn():
    run(mpjax.loss_scale_for(optax.sgd(0.1), "mixed_bfloat16"), plain)
    run(mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=True), plain)


def test_a_float16_loss_and_an_optimizer_for_bfloat16_warn():
    tx = mpjax.loss_scale_for(optax.sgd(0.1), "mixed_bfloat16")
    gradient = lambda policy: lambda params, state, x: mpjax.grad(loss_fn, state, policy=policy)(params, x)
    run(tx, gradient("mixed_bfloat16"))
    with pytest.warns(mpjax.LossScaleWarning, match="is in float16, but loss_scale_for got a policy without") as caught:
        run(tx, gradient("mixed_float16"))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("gradient", ["jax.grad", "mpjax.grad"])
def test_audit_of_such_a_step_leads_with_it(gradient):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    expected = pytest.warns(mpjax.LossScaleWarning) if gradient == "jax.grad" else contextlib.nullcontext()
    state = tx.init(PARAMS)
    with expected:
        report = mpjax.audit(step_of(tx, GRADIENTS[gradient]), PARAMS, state, X)
    assert (": unscaled" in report.headline) == (gradient == "jax.grad")
    assert bool(re.search("mpjax scales no gradient.*mpjax.value_and_grad", str(report))) == (gradient == "jax.grad")
    assert ([risk.kind for risk in report.risks[:1]] == ["unscaled"]) == (gradient == "jax.grad")


TWICE = "divides gradients by the loss scale, but mpjax.value_and_grad or mpjax.scale_loss has"


@pytest.mark.parametrize("form", ["update", "apply_gradients"])
@pytest.mark.parametrize("gradient", ["mpjax.grad", "scale_loss"])
def test_true_gradients_for_an_optimizer_that_divides_warn(gradient, form):
    """Training stood still: updates were too small by the scale."""
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=True)
    with pytest.warns(mpjax.LossScaleWarning, match=f"grads_are_scaled=True {TWICE}") as caught:
        run(tx, GRADIENTS[gradient], form)
    assert caught[0].filename == __file__


def test_true_gradients_that_are_unscaled_warn():
    def unscaled(params, state, x):
        return mpjax.unscale(GRADIENTS["scale_loss"](params, state, x), state)

    with pytest.warns(mpjax.LossScaleWarning, match=f"mpjax.unscale {TWICE}"):
        run(mpjax.dynamic_loss_scale(optax.sgd(0.1)), unscaled)


def test_gradients_that_the_loop_scales_may_be_unscaled_for_a_log():
    def scaled(params, state, x):
        grads = jax.grad(lambda params: loss_fn(params, x) * state.loss_scale)(params)
        jax.tree.map(jnp.sum, mpjax.unscale(grads, state))
        return grads

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=True), scaled, "apply_gradients")


@pytest.mark.filterwarnings("error")
def test_gradients_of_another_loss_in_the_program_warn_of_nothing():
    """A program may have true gradients, and others that its own loop scales and unscales."""
    tx, by_hand = (mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=scaled) for scaled in (False, True))

    def step(params, state, x):
        grads = jax.grad(lambda params: loss_fn(params, x) * state.loss_scale)(params)
        jax.tree.map(jnp.sum, mpjax.unscale(grads, state))
        true, _ = tx.update(GRADIENTS["mpjax.grad"](params, state, x), state, params)
        return by_hand.update(grads, state, params), true

    jax.eval_shape(step, PARAMS, tx.init(PARAMS), X)


def test_gradients_that_nothing_scaled_warn_beside_others_that_are_scaled():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, state, x):
        true, _ = tx.update(GRADIENTS["mpjax.grad"](params, state, x), state, params)
        return true, tx.update(plain(params, state, x), state, params)

    with pytest.warns(mpjax.LossScaleWarning, match=MISSED) as caught:
        jax.eval_shape(step, PARAMS, tx.init(PARAMS), X)
    assert len(caught) == 1
