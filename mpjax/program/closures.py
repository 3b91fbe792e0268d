"""Derivative rules that close over values of the program in which they are defined."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import jax

from mpjax.program import compat

_MANY = 512  # objects


def may_close_over_tracers(params: dict[str, Any]) -> bool:
    """Whether the derivative rules of an equation hold a tracer, or more objects than are worth a search."""
    pending = [params[name] for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd") if name in params]
    visited: dict[int, Any] = {}
    while pending:
        x = pending.pop()
        if isinstance(x, jax.core.Tracer) or len(visited) > _MANY:
            return True
        if id(x) not in visited:
            visited[id(x)] = x
            pending += _held_by(x)
    return False


def _held_by(x: Any) -> Iterable[Any]:
    """The objects that a function, a container or another object holds, except the globals of a function."""
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if cell != types.CellType()]
        return (*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
    if isinstance(x, types.MethodType):
        return x.__func__, x.__self__
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.values()
    if isinstance(x, compat.WrappedFun):
        return x.f, *(argument for transform in x.transforms for argument in transform)
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, (tuple, list, set, frozenset)):
        return x
    if isinstance(x, (type, types.ModuleType, jax.core.Trace)) or type(x).__module__.startswith("jaxlib."):
        return (getattr(x, "__wrapped__", None),)
    slots = (getattr(x, name, None) for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
    return *getattr(x, "__dict__", {}).values(), *slots
