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
MISSED = r"no gradient was scaled by it since its state was made.*mpjax\.value_and_grad"


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


def run(tx, gradient, form="update", restored=False):
    state = tx.init(PARAMS)
    if restored:
        tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    jax.eval_shape(step_of(tx, gradient, form), PARAMS, state, X)


@pytest.mark.parametrize("form", ["update", "apply_gradients"])
def test_an_update_with_gradients_that_nothing_scaled_warns_once(form):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    run(mpjax.dynamic_loss_scale(optax.sgd(0.1)), GRADIENTS["mpjax.grad"])  # of another state, made before
    step = step_of(tx, plain, form)
    state = tx.init(PARAMS)
    with pytest.warns(mpjax.LossScaleWarning, match=MISSED):
        jax.eval_shape(step, PARAMS, state, X)
    with warnings.catch_warnings(action="error"):
        jax.eval_shape(lambda *args: step(*args), PARAMS, state, X)


def test_nnx_and_train_states_warn_as_well():
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    with pytest.warns(mpjax.LossScaleWarning, match=MISSED):
        nnx.jit(lambda m, o: o.update(m, nnx.grad(lambda m: jnp.mean(m(X)))(m)))(model, optimizer)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with pytest.warns(mpjax.LossScaleWarning, match=MISSED):
        state.apply_gradients(grads=jax.grad(loss_fn)(PARAMS, X))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("gradient", ["mpjax.grad", "scale_loss", "unscale"])
def test_scaled_gradients_do_not_warn(gradient):
    run(mpjax.dynamic_loss_scale(optax.sgd(0.1)), GRADIENTS[gradient])


@pytest.mark.filterwarnings("error")
def test_scales_of_1_gradients_scaled_by_hand_and_restored_states_do_not_warn():
    run(mpjax.loss_scale_for(optax.sgd(0.1), "mixed_bfloat16"), plain)
    run(mpjax.dynamic_loss_scale(optax.sgd(0.1), grads_are_scaled=True), plain)
    run(mpjax.dynamic_loss_scale(optax.sgd(0.1)), plain, restored=True)


@pytest.mark.parametrize("gradient", ["jax.grad", "mpjax.grad"])
def test_audit_of_such_a_step_leads_with_it(gradient):
    tx = mpjax.dynamic_loss_scale(optax.sgd(0.1))
    expected = pytest.warns(mpjax.LossScaleWarning) if gradient == "jax.grad" else contextlib.nullcontext()
    state = tx.init(PARAMS)
    with expected:
        report = mpjax.audit(step_of(tx, GRADIENTS[gradient]), PARAMS, state, X)
    assert ("the most serious: unscaled" in report.headline) == (gradient == "jax.grad")
    assert bool(re.search("no gradient is scaled.*mpjax.value_and_grad", str(report))) == (gradient == "jax.grad")
    assert ([risk.kind for risk in report.risks[:1]] == ["unscaled"]) == (gradient == "jax.grad")
