"""Repeats a computation at lower loss scales until its gradients are finite, and keeps the scale for the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from mpjax.kernels import staging
from mpjax.launcher.session import CALLS, GOOD, SCALE, Frame
from mpjax.loss_scale.cotangents import is_differentiable
from mpjax.loss_scale.replicas import all_finite as all_finite_on
from mpjax.loss_scale.transformation import next_scale
from mpjax.program import compat
from mpjax.program.tracing import trace

# For gradients inside a function that is linearized before its scale is known.
INNER_SCALE = 2.0**7
GROWTH_INTERVAL = 2000
_MIN_SCALE = 2.0**-13


def adapted(scale: Any, grow: Any, back_off: Any) -> Any:
    """The rule of `mpjax.dynamic_loss_scale`, backing off by more: three retries go from 2**15 to 2**3."""
    return next_scale(
        scale, grow, back_off, growth_factor=2.0, backoff_factor=2.0**-4, min_scale=_MIN_SCALE, max_scale=2.0**24
    )


def all_finite(tree: Any) -> Any:
    """Whether every inexact leaf is finite, on all replicas of a `shard_map` or `pmap`."""
    return all_finite_on(tree, jnp.zeros(()), jax.sharding.get_abstract_mesh().manual_axes)


class Attempt(NamedTuple):
    """The results of one evaluation.

    Attributes:
        result: A tree of arrays.
        finite: Whether the gradients are finite, a bool of shape ().
        may_retry: Whether a lower scale could make them finite, a bool of shape ().
    """

    result: Any
    finite: Any
    may_retry: Any


class LastAttempt(NamedTuple):
    """The last attempt's results, whether they are finite, its scale, and the number of retries before it."""

    result: Any
    finite: Any
    scale: Any
    retries: Any


def read_row(present: Frame | None) -> Any:
    """The state row of the next gradient in a program; None where it can't be read, or says nothing: a derivative.

    `shard_map` and `pmap` accept no reference.
    """
    if present is None or present.states is None or jax.sharding.get_abstract_mesh().manual_axes:
        return None
    return None if compat.is_differentiating() else present.states[present.row]


def write_row(present: Frame, state: Any, found: LastAttempt, reran: Any) -> bool:
    """Counts a gradient in its row, which it returns, and keeps a scale that gave finite gradients, or grows it.

    Not under `vmap`, where each batch element would need its own row, nor where `read_row` gave none.
    """
    if state is None or jax.extend.core.unsafe_am_i_under_a_vmap_DO_NOT_USE():
        return False
    retried = found.retries > 0
    good = jnp.where(retried, 0.0, state[GOOD] + found.finite.astype(jnp.float32))
    grow = good >= GROWTH_INTERVAL
    scale = adapted(jnp.where(retried & found.finite, found.scale, state[SCALE]), grow, False)
    kept = jnp.stack([scale, jnp.where(grow, 0.0, good)])
    present.states[present.row] = jnp.concatenate([kept, state[CALLS:] + counted(found, reran)])
    return True


def counted(found: LastAttempt, reran: Any) -> Any:
    """What the columns of a row from `CALLS` on count, for one gradient."""
    return jnp.stack([x.astype(jnp.float32) for x in (jnp.ones(()), found.retries, ~found.finite, reran)])


def until_finite(evaluate: Callable[..., Attempt], args: Any, start: Any) -> LastAttempt:
    """The first finite attempt at the scales `start`, `start`/16, `start`/256, ...

    A retry evaluates everything again, including the forward pass, so no residuals are kept for it. The program is a
    `while` loop around a single copy of the computation. Replicas of a `shard_map` or `pmap` decide together.

    Args:
        evaluate: Called as `evaluate(scale, args)`.
        args: A tree of arguments of the computation.
        start: The first scale, float32 of shape ().

    Returns:
        The first attempt whose gradients are finite or that a lower scale can't help, or that at the lowest scale.
    """
    call = trace(evaluate, (jnp.asarray(start, jnp.float32), args), {}, None)
    jaxpr, consts = compat.open_jaxpr(call.jaxpr)
    # What the computation closes over is an argument of the loop, so that it can be differentiated with respect to it.
    start, *arrays = call.arrays
    arrays = [*consts, *arrays]
    if jax.extend.core.unsafe_am_i_under_a_vmap_DO_NOT_USE():
        arrays = list(map(jnp.copy, arrays))  # JAX's `custom_jvp` accepts no batch of NumPy

    def attempt(scale: Any, arrays: Sequence[Any]) -> list[Any]:
        given = (*arrays[: len(consts)], scale, *arrays[len(consts) :])
        *outs, finite, may_retry = staging.evaluate_again(jaxpr, given)
        return [finite, may_retry, *outs]

    *shapes, _, _ = [v.aval for v in jaxpr.outvars]
    scale, retries, finite, outs = _repeated(attempt, shapes, start, arrays)
    outs = [compat.with_weak_type(x, aval) for x, aval in zip(outs, shapes, strict=True)]
    return LastAttempt(call.rebuild([*outs, finite, finite]).result, finite, scale, retries)


def _repeated(attempt: Callable[..., list[Any]], shapes: Sequence[Any], start: Any, arrays: list[Any]) -> Any:
    """A loop of attempts: the last scale, the number of retries, whether the gradients are finite, and the results.

    Its derivative is that of one attempt, at a scale that leaves room for the second derivative. (JAX can't
    differentiate a `while` in reverse mode.)
    """

    @jax.custom_jvp
    def repeated(start: Any, arrays: list[Any]) -> Any:
        def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            scale, retries, *_ = carry
            scale = adapted(scale, False, retries >= 0)
            # Otherwise XLA would hoist the forward pass, which no scale enters, and keep its residuals.
            finite, go_on, *outs = attempt(scale, behind(scale, arrays))
            return scale, retries + 1, finite, go_on & (scale > _MIN_SCALE), tuple(outs)

        false, true = jnp.zeros((), jnp.bool_), jnp.ones((), jnp.bool_)
        zeros = [compat.vary(jnp.zeros(x.shape, x.dtype), tuple(compat.varying_axes_of(x))) for x in shapes]
        first = (start, jnp.full((), -1, jnp.int32), false, true, tuple(zeros))
        scale, retries, finite, _, outs = jax.lax.while_loop(lambda carry: carry[3], body, first)
        return scale, retries, finite, outs

    @repeated.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        found = scale, *_, outs = repeated(*primals)
        low = jnp.minimum(scale, INNER_SCALE)
        _, of_outs = jax.jvp(lambda arrays: tuple(attempt(low, arrays)[2:]), primals[1:], tangents[1:])
        none = np.zeros((), jax.dtypes.float0)
        of_outs = tuple(
            t if t.dtype == jax.dtypes.float0 else t.astype(x.dtype) for t, x in zip(of_outs, outs, strict=True)
        )
        return found, (scale * 0.0, none, none, of_outs)

    return repeated(start, arrays)


def behind(scale: Any, arrays: Sequence[Any]) -> list[Any]:
    """Makes arrays depend on the scale, so that XLA cannot move their uses before it is known."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        if is_differentiable(x):
            # One barrier per set of mesh axes: a barrier may spread the axes of one operand to all.
            groups.setdefault(tuple(sorted(map(str, compat.varying_axes(x)))), []).append(i)
    held = list(arrays)
    for places in groups.values():
        like = compat.vary(scale, tuple(compat.varying_axes(arrays[places[0]])))
        for i, x in zip(places, jax.lax.optimization_barrier((like, [arrays[i] for i in places]))[1], strict=True):
            held[i] = x
    return held
