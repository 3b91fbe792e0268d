"""Optimizer steps of the script. A step with nonfinite gradients is skipped."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from mpjax.launcher.session import Session, frame

# Set inside an update: transformations may contain others, and only the outermost decides.
_DECIDED: contextvars.ContextVar[bool] = contextvars.ContextVar("decided", default=False)


def guarded(session: Session, update: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an optax `update` so that nonfinite gradients give zero updates and keep the state."""

    @functools.wraps(update)
    def update_if_finite(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        def skipped(shapes: Any) -> Any:
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0]), state

        return _taken(session, updates, lambda: update(updates, state, params, **extra), skipped)

    return update_if_finite


def guarded_state(session: Session, update: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the `update` of `jax.example_libraries.optimizers` so that nonfinite gradients keep the state."""
    return functools.wraps(update)(
        lambda step, grads, state: _taken(session, grads, lambda: update(step, grads, state), lambda _: state)
    )


def _taken(session: Session, grads: Any, take: Callable[[], Any], skip: Callable[[Any], Any]) -> Any:
    """The result of `take`, or if the gradients are not finite, of `skip`, which is given the shapes of the former."""
    present = frame()
    if present is not None:
        present.optimizes = True

    def decided() -> Any:
        token = _DECIDED.set(True)
        try:
            # An optimizer's matmuls (Shampoo, Muon) are not the model's.
            with mpjax.autocast_disabled():
                return take()
        finally:
            _DECIDED.reset(token)

    if not session.scales or not session.sites or _DECIDED.get():
        return decided()
    from mpjax.launcher.retrying import all_finite, strong

    finite = _known(grads)
    finite = all_finite(grads) if finite is None else finite
    if not isinstance(finite, jax.core.Tracer) and bool(finite):
        return decided()
    shapes = jax.eval_shape(decided)
    other = skip(shapes)
    if not isinstance(finite, jax.core.Tracer):
        return other
    if _types(shapes) != _types(other):
        # A state whose structure or types change in a step can't pass through `cond`, so the step is unguarded.
        return decided()
    return jax.lax.cond(finite, lambda: strong(decided()), lambda: strong(other))


def _known(grads: Any) -> Any:
    """Whether gradients are finite, if a differentiated function returned exactly these; None for all others."""
    present = frame()
    leaves = jax.tree.leaves(grads)
    for handed_out, finite in reversed(present.finite if present else []):
        if len(leaves) == len(handed_out) and all(a is b for a, b in zip(leaves, handed_out, strict=True)):
            return finite
    return None


def _types(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves]
