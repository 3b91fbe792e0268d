"""Training steps with every library's loss scaling, for the same loss function and optimizer.

Each form is `(init, step)`: `init(params)` returns the state, `step(params, state, x, y)` the new params, state and
loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from jax.experimental.layout import Layout, with_layout_constraint

import mpjax

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]
Step = Callable[[Any, Any, jax.Array, jax.Array], tuple[Any, Any, jax.Array]]
SCALE = 2.0**15


@dataclasses.dataclass(frozen=True)
class Form:
    init: Callable[[Any], Any]
    step: Step


def forms(tx: optax.GradientTransformation, loss_fn: Loss) -> dict[str, Form]:
    """All forms by name; the first is the baseline."""
    dynamic = mpjax.dynamic_loss_scale(tx)
    by_hand = mpjax.dynamic_loss_scale(tx, grads_are_scaled=True)
    return {
        "no loss scaling": Form(tx.init, _plain(tx, loss_fn)),
        "no loss scaling, again": Form(tx.init, _plain(tx, loss_fn)),
        "no loss scaling, gradients in row-major layout": Form(tx.init, _plain(tx, loss_fn, _row_major)),
        "mpjax: apply_gradients": Form(dynamic.init, _apply(dynamic, loss_fn)),
        "mpjax: apply_gradients, grads_are_scaled": Form(by_hand.init, _scaled_by_hand(by_hand, loss_fn)),
        "mpjax: tx.update, apply_updates": Form(dynamic.init, _update(dynamic, loss_fn)),
        "Flax DynamicScale": Form(lambda params: (tx.init(params), _flax_scale()), _flax(tx, loss_fn)),
        "jmp": Form(lambda params: (tx.init(params), _jmp_scale()), _jmp(tx, loss_fn)),
        "mixed-precision-for-JAX": Form(lambda params: (tx.init(params), _mpx_scale()), _mpx(tx, loss_fn)),
    }


def _plain(tx: optax.GradientTransformation, loss_fn: Loss, arranged: Callable[[Any], Any] = lambda g: g) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grads = arranged(grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def _row_major(grads: Any) -> Any:
    """Chooses the layout that operands of a `lax.cond` have, in which Adam reads the gradients in order of memory."""
    layouts = jax.tree.map(lambda g: Layout(tuple(range(g.ndim))), grads)
    return jax.lax.optimization_barrier(jax.tree.map(with_layout_constraint, grads, layouts))


def _update(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x, y)
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    return step


def _apply(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x, y)
        params, state = mpjax.apply_gradients(tx, grads, state, params, value=loss)
        return params, state, loss

    return step


def _scaled_by_hand(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    """`grads_are_scaled=True`: the update unscales the gradients, not the backward pass."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, x, y) * state.loss_scale)(params)
        params, state = mpjax.apply_gradients(tx, grads, state, params, value=loss)
        return params, state, loss

    return step


def _flax_scale() -> DynamicScale:
    # Arrays, because its Python numbers cause a retrace.
    return DynamicScale(fin_steps=cast(Any, jnp.int32(0)), scale=cast(Any, jnp.float32(SCALE)))


def _flax(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    """As in Flax's examples."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        opt_state, scale = state
        scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, x, y)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, (params, opt_state))
        return params, (opt_state, scale), loss

    return step


def _jmp_scale() -> tuple[jax.Array, jax.Array]:
    # Only its arrays: jmp's own object fails in `jax.jit(...).lower`.
    return jnp.float32(SCALE), jnp.int32(0)


def _jmp(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    """As in jmp's README."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        opt_state, arrays = state
        scale = jmp.DynamicLossScale(*arrays)

        def scaled(params: Any) -> tuple[jax.Array, jax.Array]:
            loss = loss_fn(params, x, y)
            return scale.scale(loss), loss

        (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        grads = scale.unscale(grads)
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state
        params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
        scale = scale.adjust(finite)
        return params, (opt_state, (scale.loss_scale, scale.counter)), loss

    return step


def _mpx_scale() -> Any:
    import mpx

    return mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1.0))


def _mpx(tx: optax.GradientTransformation, loss_fn: Loss) -> Step:
    """As in its README. It casts params and batch to float16 itself and supports no other half dtype."""

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        import mpx

        opt_state, scale = state
        loss, scale, finite, grads = mpx.filter_value_and_grad(loss_fn, scale)(params, x, y)
        params, opt_state = mpx.optimizer_update(params, tx, opt_state, grads, finite)
        return params, (opt_state, scale), loss

    return step
