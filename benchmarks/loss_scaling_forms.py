"""Training steps with every library's loss scaling, for the same loss function and optimizer.

Each form is `(init, step)`: `init(params)` returns the state, `step(params, state, x, y)` the new params, state and
loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale
from jax.experimental.layout import Layout, with_layout_constraint

import mpjax

Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]
Tx: TypeAlias = optax.GradientTransformation
Stepped = tuple[Any, Any, jax.Array]
SCALE = 2.0**15


@dataclasses.dataclass(frozen=True)
class Form:
    init: Callable[[Any], Any]
    step: Callable[[Any, Any, jax.Array, jax.Array], Stepped]


def forms(tx: Tx, loss_fn: Loss) -> dict[str, Form]:
    """All forms by name; the first is the baseline."""

    def form(step: Callable[..., Stepped], tx: Tx = tx, scale: Callable[[], Any] | None = None) -> Form:
        """The form of a step below. `scale` makes the loss scale that its state has beside that of the optimizer."""
        init = tx.init if scale is None else lambda params: (tx.init(params), scale())
        return Form(init, functools.partial(step, tx, loss_fn))

    dynamic = mpjax.dynamic_loss_scale(tx)
    return {
        "no loss scaling": form(_plain),
        "no loss scaling, again": form(_plain),
        "no loss scaling, gradients in row-major layout": form(functools.partial(_plain, arranged=_row_major)),
        "mpjax: apply_gradients": form(_apply, dynamic),
        "mpjax: apply_gradients, grads_are_scaled": form(
            _scaled_by_hand, mpjax.dynamic_loss_scale(tx, grads_are_scaled=True)
        ),
        "mpjax: tx.update, apply_updates": form(_update, dynamic),
        "Flax DynamicScale": form(_flax, scale=_flax_scale),
        "jmp": form(_jmp, scale=_jmp_scale),
        "mixed-precision-for-JAX": form(_mpx, scale=_mpx_scale),
    }


def _plain(
    tx: Tx, loss_fn: Loss, params: Any, state: Any, *batch: jax.Array, arranged: Callable[[Any], Any] = lambda g: g
) -> Stepped:
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, state = tx.update(arranged(grads), state, params)
    return optax.apply_updates(params, updates), state, loss


def _row_major(grads: Any) -> Any:
    """Chooses the layout that operands of a `lax.cond` have, in which Adam reads the gradients in order of memory."""
    layouts = jax.tree.map(lambda g: Layout(tuple(range(g.ndim))), grads)
    return jax.lax.optimization_barrier(jax.tree.map(with_layout_constraint, grads, layouts))


def _update(tx: Tx, loss_fn: Loss, params: Any, state: Any, *batch: jax.Array) -> Stepped:
    loss, grads = mpjax.value_and_grad(loss_fn, state)(params, *batch)
    updates, state = optax.with_extra_args_support(tx).update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state, loss


def _apply(tx: Tx, loss_fn: Loss, params: Any, state: Any, *batch: jax.Array) -> Stepped:
    loss, grads = mpjax.value_and_grad(loss_fn, state)(params, *batch)
    params, state = mpjax.apply_gradients(tx, grads, state, params, value=loss)
    return params, state, loss


def _scaled_by_hand(tx: Tx, loss_fn: Loss, params: Any, state: Any, *batch: jax.Array) -> Stepped:
    """`grads_are_scaled=True`: the update unscales the gradients, not the backward pass."""
    loss, grads = jax.value_and_grad(lambda p: loss_fn(p, *batch) * state.loss_scale)(params)
    params, state = mpjax.apply_gradients(tx, grads, state, params, value=loss)
    return params, state, loss


def _flax_scale() -> DynamicScale:
    # Arrays, because its Python numbers cause a retrace.
    return DynamicScale(fin_steps=cast(Any, jnp.int32(0)), scale=cast(Any, jnp.float32(SCALE)))


def _flax(tx: Tx, loss_fn: Loss, params: Any, state: Any, *batch: jax.Array) -> Stepped:
    """As in Flax's examples."""
    opt_state, scale = state
    scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, *batch)
    updates, new_state = tx.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_state
    params, opt_state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, (params, opt_state))
    return params, (opt_state, scale), loss


def _jmp_scale() -> tuple[jax.Array, jax.Array]:
    # Only its arrays: jmp's own object fails in `jax.jit(...).lower`.
    return jnp.float32(SCALE), jnp.int32(0)


def _jmp(tx: Tx, loss_fn: Loss, params: Any, state: Any, *batch: jax.Array) -> Stepped:
    """As in jmp's README."""
    opt_state, arrays = state
    scale = jmp.DynamicLossScale(*arrays)

    def scaled(params: Any) -> tuple[jax.Array, jax.Array]:
        loss = loss_fn(params, *batch)
        return scale.scale(loss), loss

    (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    updates, new_state = tx.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_state
    params, opt_state = jmp.select_tree(finite, new, (params, opt_state))
    scale = scale.adjust(finite)
    return params, (opt_state, (scale.loss_scale, scale.counter)), loss


def _mpx_scale() -> Any:
    import mpx

    return mpx.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1.0))


def _mpx(tx: Tx, loss_fn: Loss, params: Any, state: Any, *batch: jax.Array) -> Stepped:
    """As in its README. It casts params and batch to float16 itself and supports no other half dtype."""
    import mpx

    opt_state, scale = state
    loss, scale, finite, grads = mpx.filter_value_and_grad(loss_fn, scale)(params, *batch)
    params, opt_state = mpx.optimizer_update(params, tx, opt_state, grads, finite)
    return params, (opt_state, scale), loss
