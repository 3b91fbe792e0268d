"""What a step hands on to the next one: its own state, never gradients."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.inspection.profile.carry import carried

W = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
X = jnp.ones((2, 4))


def loss(w, x):
    return jnp.sum((x @ w["w"] + w["b"]) ** 2)


def skipping(tx):
    def step(params, state, x):
        _, grads = mpjax.value_and_grad(loss, state)(params, x)
        params, state = mpjax.apply_gradients(tx, grads, state, params)
        return params, state, 0.0

    return step


ADAM = mpjax.dynamic_loss_scale(optax.adam(1e-3))


@pytest.mark.parametrize(
    ("step", "args", "count"),
    [
        (jax.grad(loss), (W, X), 0),
        (jax.grad(loss, argnums=(0, 1)), (W, X), 0),
        (jax.jit(jax.grad(lambda w, x: (loss(w, x), x), has_aux=True)), (W, X), 0),
        (lambda w, x: jax.tree.map(lambda g, p: g + 0.1 * p, jax.grad(loss)(w, x), w), (W, X), 0),
        (lambda w, x: jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x)), (W, X), 1),
        (jax.jit(skipping(ADAM)), (W, ADAM.init(W), X), 2),
        (lambda x: x @ x, (jnp.eye(4),), 0),
    ],
)
def test_only_what_a_step_updates_is_carried(step, args, count):
    assert carried(step, args, step(*args), donates=False) == count
