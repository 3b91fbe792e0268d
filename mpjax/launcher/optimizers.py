"""Optimizer steps of the script. A step with nonfinite gradients is skipped."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from mpjax.launcher.retrying import all_finite
from mpjax.launcher.session import Session, frame, is_tracer

# Set inside an update: transformations may contain others, and only the outermost decides.
_DECIDED: contextvars.ContextVar[bool] = contextvars.ContextVar("decided", default=False)


def guarded(session: Session, update: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optax `update` so that nonfinite gradients give zero updates and keep the state."""
    update = in_float32(update)

    def update_if_finite(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        present = frame()
        if present is not None:
            present.optimizes = True
        if not session.scales or _DECIDED.get():
            return update(updates, state, params, **extra)

        def take() -> Any:
            token = _DECIDED.set(True)
            try:
                return update(updates, state, params, **extra)
            finally:
                _DECIDED.reset(token)

        finite = _known(updates) if present is not None else None
        finite = all_finite(updates) if finite is None else finite
        if is_tracer(finite):
            return _choose(finite, take, state)
        return take() if bool(finite) else (_zeros(jax.eval_shape(take)[0]), state)

    return update_if_finite


def in_float32(update: Callable[..., Any]) -> Callable[..., Any]:
    """Disables autocast in an optimizer: its matmuls (Shampoo, Muon) are not the model's."""

    @functools.wraps(update)
    def called(*args: Any, **kwargs: Any) -> Any:
        with mpjax.autocast_disabled():
            return update(*args, **kwargs)

    return called


def _known(grads: Any) -> Any:
    """Whether gradients are finite, if a differentiated function returned exactly these; None for all others."""
    present = frame()
    leaves = jax.tree.leaves(grads)
    for handed_out, finite in reversed(present.finite if present else []):
        if len(leaves) == len(handed_out) and all(a is b for a, b in zip(leaves, handed_out, strict=True)):
            return finite
    return None


def _choose(finite: Any, take: Callable[[], Any], state: Any) -> Any:
    leaves, tree = jax.tree.flatten(jax.eval_shape(take))
    kept, kept_tree = jax.tree.flatten(state)
    structure: Any = jax.tree.structure(jax.tree.unflatten(tree, leaves)[1])
    count = len(leaves) - len(kept)
    arrays = all(isinstance(x, jax.Array) for x in kept)
    same = arrays and structure == kept_tree
    if not same or any(a.shape != b.shape or a.dtype != b.dtype for a, b in zip(leaves[count:], kept, strict=True)):
        # A state whose structure or types change in a step can't pass through `cond`, so the step is unguarded.
        return take()
    zeros = [jnp.zeros(x.shape, x.dtype) for x in leaves[:count]]
    outs = jax.lax.cond(finite, lambda: _strong(jax.tree.leaves(take())), lambda: _strong([*zeros, *kept]))
    return jax.tree.unflatten(tree, outs)


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _strong(leaves: list[Any]) -> list[Any]:
    """Removes weak types, on which both branches of a `cond` must agree."""
    return [jax.lax.convert_element_type(x, jnp.result_type(x)) for x in leaves]
