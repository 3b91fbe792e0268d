"""Gradients of the script's functions under autocast and loss scaling, repeated at lower scales until finite."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

from mpjax._jaxpr import compat
from mpjax.launcher.reruns import finite_results
from mpjax.launcher.retrying import INNER_SCALE, MAX_SCALE, Attempt, LastAttempt, all_finite, until_finite
from mpjax.launcher.session import (
    CALLS,
    GOOD,
    NONFINITE,
    RERUNS,
    RETRIES,
    ROWS,
    SCALE,
    Session,
    differentiating,
    enclosing_scale,
    frame,
)

GROWTH_INTERVAL = 500


@dataclasses.dataclass(frozen=True)
class Originals:
    """The functions of JAX that the launcher replaces."""

    value_and_grad: Callable[..., Any]
    vjp: Callable[..., Any]
    linearize: Callable[..., Any]


def value_and_grad(
    session: Session, originals: Originals, fun: Callable[..., Any], has_aux: bool, argnums: Any
) -> Callable[..., Any]:
    """`jax.value_and_grad(fun, argnums, has_aux)`, in the policy of the session."""

    def both(*args: Any, **kwargs: Any) -> Any:
        repeated = repeatable(fun)
        cast = session.autocast(repeated)
        session.explain(cast, args, kwargs)

        def scaled(scale: Any) -> Callable[..., Any]:
            @functools.wraps(fun)
            def loss_times_scale(*args: Any, **kwargs: Any) -> Any:
                out = cast(*args, **kwargs)
                if not has_aux:
                    return _times(out, scale), out
                loss, _ = out
                return _times(loss, scale), out

            return loss_times_scale

        def evaluate(scale: Any, given: Any) -> Attempt:
            args, kwargs = given
            transform = originals.value_and_grad(scaled(scale), argnums=argnums, has_aux=True)
            with differentiating(scale) as entered:
                (_, out), grads = transform(*args, **kwargs)
            grads = _divided(grads, scale)
            return Attempt((out, grads), all_finite(grads), out[0] if has_aux else out, entered.read)

        def finished(attempt: Attempt) -> tuple[Attempt, Any]:
            out, reran = finite_results(session, repeated, args, kwargs, attempt.result[0])
            result, loss = (out, attempt.result[1]), out[0] if has_aux else out
            return dataclasses.replace(attempt, result=result, loss=loss), reran

        return gradients_of(session, evaluate, (args, kwargs), lambda result: jax.tree.leaves(result[1]), finished)

    return both


def chosen(args: Sequence[Any], argnums: Any) -> Sequence[Any]:
    """The arguments with respect to which a call is differentiated; all of them if the call does not fit."""
    places = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    try:
        return tuple(args[i] for i in places)
    except (IndexError, TypeError):  # JAX's own error is better.
        return args


def vjp(
    session: Session, original: Callable[..., Any], fun: Callable[..., Any], primals: Any, options: dict[str, Any]
) -> Any:
    """`jax.vjp` or `jax.linearize` with a linear map that scales vectors, at lower scales until it is finite."""
    fun = repeatable(fun)
    cast = session.autocast(fun)
    session.explain(cast, primals, {})
    with differentiating(_inner_scale()):
        out, linear, *aux = original(cast, *primals, **options)
    if enclosing_scale() is None:
        values = (out, *aux) if aux else out
        values, _ = finite_results(session, fun, primals, {}, values)
        out, *aux = values if aux else (values,)

    def evaluate(scale: Any, given: Any) -> Attempt:
        linear, vectors = given
        result = _divided(linear(*(_multiplied(vectors, scale))), scale)
        return Attempt(result, all_finite(result), vectors)

    def applied(linear: Any, *vectors: Any) -> Any:
        return gradients_of(session, evaluate, (linear, vectors), jax.tree.leaves)

    return (out, jax.tree_util.Partial(applied, linear), *aux)


def repeatable(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function safe to call repeatedly: those that `nnx.grad` differentiates consume a queue in each call."""
    queues = [(queue, tuple(queue)) for queue in getattr(fun, "__dict__", {}).values() if isinstance(queue, deque)]
    if not queues:
        return fun

    @functools.wraps(fun, updated=())
    def refilled(*args: Any, **kwargs: Any) -> Any:
        for queue, items in queues:
            queue.clear()
            queue.extend(items)
        return fun(*args, **kwargs)

    return refilled


def _inner_scale() -> Any:
    outer = enclosing_scale()
    return jnp.asarray(INNER_SCALE, jnp.float32) if outer is None else outer.value


def _unchanged(attempt: Attempt) -> tuple[Attempt, Any]:
    return attempt, jnp.zeros((), jnp.bool_)


def gradients_of(
    session: Session,
    evaluate: Callable[..., Attempt],
    args: Any,
    leaves_of: Callable[[Any], list[Any]],
    finished: Callable[[Attempt], tuple[Attempt, Any]] = _unchanged,
) -> Any:
    """The result of the first evaluation with finite gradients, or of the last if no scale makes them finite.

    Args:
        session: The session of this process.
        evaluate: Called as `evaluate(scale, args)`. It returns unscaled gradients.
        args: The arguments of `evaluate`.
        leaves_of: Returns the gradients in a result.
        finished: Replaces nonfinite values of the last attempt. It returns the attempt and whether it replaced any, a
            bool of shape ().
    """
    outer, present = enclosing_scale(), frame()
    if outer is not None:  # Only the outermost gradient is repeated, with all that it contains.
        outer.read = True
        return evaluate(outer.value, args).result
    states = None if present is None else present.states
    row = 0
    if present is not None:
        present.differentiates = True
        row, present.sites = min(present.sites, ROWS - 1), present.sites + 1
    state = _read(states, row)
    if not session.scales:
        attempt = evaluate(jnp.ones((), jnp.float32), args)
        found = LastAttempt(attempt, jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32))
    else:
        start = jnp.asarray(session.options.init_scale, jnp.float32) if state is None else state[SCALE]
        found = until_finite(evaluate, args, start)
        if present is not None:
            present.finite.append((leaves_of(found.attempt.result), found.attempt.finite))
    attempt, reran = finished(found.attempt)
    found = dataclasses.replace(found, attempt=attempt)
    if state is not None:
        _write(states, row, _next_state(session, state, found, reran))
    return found.attempt.result


def _next_state(session: Session, state: Any, found: LastAttempt, reran: Any) -> Any:
    """The state row after a gradient. It keeps the scale that gave finite gradients, and doubles it after many calls
    without a retry."""
    finite = found.attempt.finite if session.scales else all_finite(found.attempt.result)
    retried = found.retries > 0
    good = jnp.where(retried, 0.0, jnp.where(finite, state[GOOD] + 1, state[GOOD]))
    grow = (good >= GROWTH_INTERVAL) if session.scales else jnp.zeros((), jnp.bool_)
    scale = jnp.where(retried & finite, found.scale, state[SCALE])
    row = {
        SCALE: jnp.where(grow, jnp.minimum(scale * 2.0, MAX_SCALE), scale),
        GOOD: jnp.where(grow, 0.0, good),
        CALLS: state[CALLS] + 1,
        RETRIES: state[RETRIES] + found.retries.astype(jnp.float32),
        NONFINITE: state[NONFINITE] + jnp.where(finite, 0.0, 1.0),
        RERUNS: state[RERUNS] + reran.astype(jnp.float32),
    }
    return jnp.stack([row[i] for i in range(len(row))])


def _read(states: Any, row: int) -> Any:
    """A row of the step's states; None where it can't be read, or has no meaning for the next step: a derivative.

    `shard_map` and `pmap` accept no reference.
    """
    if states is None or jax.sharding.get_abstract_mesh().manual_axes or compat.is_differentiating():
        return None
    return states[row]


def _write(states: Any, row: int, value: Any) -> None:
    # A reference cannot be written under vmap, where each batch element would need a separate state.
    if not jax.extend.core.unsafe_am_i_under_a_vmap_DO_NOT_USE():
        states[row] = value


def _is_scaled(x: Any) -> bool:
    return hasattr(x, "dtype") and bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _times(x: Any, factor: Any) -> Any:
    """Multiplies in float32 or wider, rounding once to the dtype of `x`. Changes only real and complex arrays."""
    if not _is_scaled(x):
        return x
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return compat.with_weak_type((x.astype(wide) * factor.astype(wide)).astype(x.dtype), jax.typeof(x))


def _multiplied(tree: Any, scale: Any) -> Any:
    return jax.tree.map(lambda x: _times(x, scale), tree)


def _divided(tree: Any, scale: Any) -> Any:
    return jax.tree.map(lambda x: _times(x, 1.0 / scale), tree)
