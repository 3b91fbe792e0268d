"""Repeats a computation at lower loss scales until its gradients are finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr import compat

# Each retry multiplies the scale by this factor. Three retries go from 2**15 to 2**3.
BACKOFF = 2.0**-4
MIN_SCALE, MAX_SCALE = 2.0**-13, 2.0**24
# For gradients inside a function that is linearized before its scale is known.
INNER_SCALE = 2.0**7


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The result of one evaluation.

    Args:
        result: Any tree. Leaves that are not arrays must be the same at every scale.
        finite: Whether the gradients are finite, a bool of shape ().
        loss: The loss, or any tree.
        loss_is_scaled: Whether the loss depends on the scale, as it does if it contains a gradient. Otherwise a retry
            cannot help if the loss is not finite.
    """

    result: Any
    finite: Any
    loss: Any
    loss_is_scaled: bool = False

    @property
    def may_retry(self) -> Any:
        """Whether a lower scale could help."""
        return ~self.finite if self.loss_is_scaled else ~self.finite & all_finite(self.loss)


@dataclasses.dataclass(frozen=True)
class LastAttempt:
    """The last attempt, its scale and the number of retries, both of shape ()."""

    attempt: Attempt
    scale: Any
    retries: Any


def until_finite(evaluate: Callable[..., Attempt], args: Any, start: Any) -> LastAttempt:
    """The first finite attempt at the scales `start`, `start`/16, `start`/256, ...

    A retry evaluates everything again, including the forward pass, so no residuals are kept for it. Under a trace, the
    program is a `while` loop around a single copy of the computation. Replicas of a `shard_map` or `pmap` decide
    together.

    Args:
        evaluate: Called as `evaluate(scale, args)`.
        args: A tree of arguments of the computation.
        start: The first scale, float32 of shape ().

    Returns:
        The first attempt whose gradients are finite or whose loss is not, or the attempt at the lowest scale.
    """
    return (_loop if compat.is_tracing() else _eager)(evaluate, args, start)


def all_finite(tree: Any) -> Any:
    """Whether every inexact leaf is finite, on all replicas of a `shard_map` or `pmap`."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)]
    finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all() if leaves else jnp.ones((), jnp.bool_)
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jax.lax.pmin(finite.astype(jnp.int32), axes).astype(jnp.bool_) if axes else finite


def lower(scale: Any) -> Any:
    """The scale of the next attempt."""
    return jnp.maximum(scale * BACKOFF, MIN_SCALE)


def _eager(evaluate: Callable[..., Attempt], args: Any, start: Any) -> LastAttempt:
    scale, retries = start, 0
    while True:
        attempt = evaluate(scale, args)
        if not bool(attempt.may_retry) or float(scale) <= MIN_SCALE:
            return LastAttempt(attempt, scale, jnp.asarray(retries, jnp.int32))
        scale, retries = lower(scale), retries + 1


def _loop(evaluate: Callable[..., Attempt], args: Any, start: Any) -> LastAttempt:
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    made: dict[str, Any] = {}

    def flat(scale: Any, *arrays: Any) -> tuple[Any, Any, list[Any]]:
        attempt = evaluate(scale, jax.tree.unflatten(tree, _filled(leaves, places, arrays)))
        outs, made["tree"] = jax.tree.flatten((attempt.result, attempt.loss))
        # Tracers must not outlive the trace.
        made["leaves"] = [_Array(_impl(x)) if isinstance(x, jax.Array) else x for x in outs]
        return attempt.finite, attempt.may_retry, [_key_data(x) for x in outs if isinstance(x, jax.Array)]

    jaxpr, consts = compat.open_jaxpr(compat.trace(flat, start, *(leaves[i] for i in places)))
    # What the computation closes over is an argument of the loop, so that it can be differentiated with respect to it.
    arrays = [*consts, *(leaves[i] for i in places)]

    def attempt(scale: Any, arrays: Sequence[Any]) -> list[Any]:
        return jax.core.eval_jaxpr(jaxpr, arrays[: len(consts)], scale, *arrays[len(consts) :])

    shapes = [v.aval for v in jaxpr.outvars[2:]]
    scale, retries, finite, outs = _repeated(attempt, shapes, jnp.asarray(start, jnp.float32), arrays)
    rest = (compat.with_weak_type(x, aval) for x, aval in zip(outs, shapes, strict=True))
    result, loss = jax.tree.unflatten(
        made["tree"], [_wrap_key(next(rest), x.impl) if isinstance(x, _Array) else x for x in made["leaves"]]
    )
    return LastAttempt(Attempt(result, finite, loss), scale, retries)


def _repeated(attempt: Callable[..., list[Any]], shapes: Sequence[Any], start: Any, arrays: list[Any]) -> Any:
    """A loop of attempts: the last scale, the number of retries, whether the gradients are finite, and the results.

    Its derivative is that of one attempt, at a scale that leaves room for the second derivative. (JAX can't
    differentiate a `while` in reverse mode.)
    """

    @jax.custom_jvp
    def repeated(start: Any, arrays: list[Any]) -> Any:
        def body(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            scale, retries, *_ = carry
            scale = jnp.where(retries < 0, scale, lower(scale))
            # Otherwise XLA would hoist the forward pass, which no scale enters, and keep its residuals.
            finite, go_on, *outs = attempt(scale, behind(scale, arrays))
            return scale, retries + 1, finite, go_on & (scale > MIN_SCALE), tuple(outs)

        false, true = jnp.zeros((), jnp.bool_), jnp.ones((), jnp.bool_)
        first = (start, jnp.full((), -1, jnp.int32), false, true, tuple(map(_zeros, shapes)))
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
        if jnp.issubdtype(x.dtype, jnp.inexact):
            # One barrier per set of mesh axes: a barrier may spread the axes of one operand to all.
            groups.setdefault(tuple(sorted(map(str, varying_axes(x)))), []).append(i)
    held = list(arrays)
    for places in groups.values():
        like = compat.vary(scale, varying_axes(arrays[places[0]]))
        held = _filled(held, places, jax.lax.optimization_barrier((like, [arrays[i] for i in places]))[1])
    return held


def varying_axes(x: Any) -> tuple[Any, ...]:
    """The mesh axes along which an array varies, in a `shard_map` that tracks them."""
    return tuple(jax.typeof(x).manual_axis_type.varying)


def _filled(leaves: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    filled = list(leaves)
    for i, value in zip(places, values, strict=True):
        filled[i] = value
    return filled


def is_key(x: Any) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def _key_data(x: Any) -> Any:
    """Converts a random key to its integers."""
    return jax.random.key_data(x) if is_key(x) else x


@dataclasses.dataclass(frozen=True)
class _Array:
    """In place of an array in a result; `impl` if it holds random keys."""

    impl: Any


def _impl(x: Any) -> Any:
    return jax.random.key_impl(x) if is_key(x) else None


def _wrap_key(x: Any, impl: Any) -> Any:
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def _zeros(aval: Any) -> Any:
    """Zeros of an array type, varying along the same mesh axes."""
    return compat.vary(jnp.zeros(aval.shape, aval.dtype), tuple(aval.manual_axis_type.varying))
