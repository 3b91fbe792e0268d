"""float32 stand-ins for the mpjax names that have not landed yet."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpjax


class State(NamedTuple):
    loss_scale: Any
    good_steps: Any
    skipped_steps: Any
    consecutive_skips: Any
    last_finite: Any
    inner_state: Any


def loss_scale_for(policy, inner, **kw):
    def init(params):
        z = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return State(jnp.ones(()), *z, jnp.array(True), inner.init(params))

    def update(grads, state, params=None, **kw):
        u, i = inner.update(grads, state.inner_state, params)
        return u, state._replace(inner_state=i)

    return optax.GradientTransformation(init, update)


def apply_gradients(tx, grads, opt_state, params, value=None):
    u, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, u), opt_state


SHIMS = {
    "with_policy": lambda model, policy: model,
    "loss_scale_for": loss_scale_for,
    "master_weights": lambda inner, policy: inner,
    "value_and_grad": lambda fun, opt_state=None, has_aux=False: jax.value_and_grad(fun, has_aux=has_aux),
    "apply_gradients": apply_gradients,
    "keep_if_finite": lambda opt_state, new, old: new,
    "check_progress": lambda opt_state: None,
    "LossScaleError": ArithmeticError,
}
for _name, _value in SHIMS.items():
    if not hasattr(mpjax, _name):
        setattr(mpjax, _name, _value)
