"""Running operations of code that is being traced, or of a jaxpr, in another way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mpjax.program import compat


def retraced(jaxpr: Any, fun: Callable[..., Any]) -> Any:
    """A jaxpr of `fun` with the types of another jaxpr, to be put in its place. That one if it takes references."""
    opened = compat.open_jaxpr(jaxpr).jaxpr
    ins, outs = ([v.aval for v in each] for each in (opened.invars, opened.outvars))
    if not all(map(compat.is_shaped, (*ins, *outs))):
        return jaxpr

    def typed(*args: Any) -> list[Any]:
        return [compat.with_weak_type(jax.numpy.asarray(x), aval) for x, aval in zip(fun(*args), outs, strict=True)]

    replacement = jax.make_jaxpr(typed)(*map(_struct, ins))
    if hasattr(jaxpr, "consts"):
        return replacement
    return compat.open_jaxpr(replacement).jaxpr if not compat.open_jaxpr(replacement).consts else jaxpr


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    types = {} if sharding is None else {"sharding": sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, **types)


class _Intercepted:
    """A trace that passes some operations to a function, and is otherwise the trace below it."""

    def __init__(self, below: Any, concerns: Callable[..., bool], bind: Callable[..., Any]) -> None:
        self.below, self.concerns, self.bind = below, concerns, bind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /) -> Any:
        if not self.concerns(primitive, args):
            return self.below.process_primitive(primitive, args, params)
        with compat.set_current_trace(self.below):
            return self.bind(primitive, args, params)


@contextlib.contextmanager
def intercepted(concerns: Callable[..., bool], bind: Callable[..., Any]) -> Iterator[None]:
    """A context in which `bind(primitive, args, params)` runs the operations that `concerns(primitive, args)` names.

    Functions under `jit` and loops arrive as one operation, with their jaxpr. Custom derivative rules do not arrive.
    """
    with compat.set_current_trace(_Intercepted(_trace_below(), concerns, bind)):
        yield


def _trace_below() -> Any:
    trace = compat.trace_ctx.trace
    return trace.below if type(trace) is _Intercepted else trace


# What the frame of a loop's body, and of a body under `jax.checkpoint`, is traced for.
_LOOPS, _RECOMPUTED = ("scan", "flax scan", "while_body", "fori_loop"), ("checkpoint / remat", "checkpoint", "remat")


def body_of_loop() -> Any:
    """The trace of a loop's body if that is what JAX is tracing, `jax.checkpoint` aside; else None."""
    trace = _trace_below()
    while traced_for(trace) in _RECOMPUTED:
        trace = trace.parent_trace.below if type(trace.parent_trace) is _Intercepted else trace.parent_trace
    return trace if traced_for(trace) in _LOOPS else None


def traced_for(trace: Any) -> str | None:
    """What a trace is for, such as "jit" or "scan"; None if it is not of a whole function."""
    frame = getattr(trace, "frame", None)
    return getattr(frame.debug_info, "traced_for", None) if frame else None
