"""The two ways to update params, for tests that run over both."""

import jax
import optax

import mpjax


def updated(tx, form, grads, state, params):
    """The new params and state: by optax's interface ("update"), or by `mpjax.apply_gradients` ("apply")."""
    if form == "apply":
        return mpjax.apply_gradients(tx, grads, state, params)
    updates, state = tx.update(grads, state, params)
    with jax.numpy_dtype_promotion("standard"):  # optax adds the float32 updates to half params
        return optax.apply_updates(params, updates), state
