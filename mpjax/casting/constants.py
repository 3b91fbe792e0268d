"""Numbers that a program holds, or makes of nothing else, are known when it is planned: do they fit half?"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.casting.classify import EXACT
from mpjax.casting.lattice import FULL, PARAMETER, Beyond, Inferred, Level, castable
from mpjax.program import compat
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import sub_jaxprs
from mpjax.program.host import bind_on_host
from mpjax.program.primitives import primitive

# By name: a maximum bounds from below.

# Larger constants are weights, in the memory of a device, or masks.
_MOST = 2**16


def constant(x: Any, half: np.dtype) -> Inferred:
    """A constant of the program: castable, if it fits half or is not known (None)."""
    beyond = Beyond.NONE if x is None else beyond_half(half, x)
    return Inferred(Level.FLOAT, FULL, beyond=beyond) if beyond else PARAMETER


def out_of_range(half: np.dtype) -> str:
    """The reason for float32 of what reads a constant that does not fit."""
    return f"{EXACT} a constant is outside the range of {half}"


def beyond_half(half: np.dtype, *constants: Any) -> Beyond:
    """Where the finite numbers of constants lie if half does not represent them: some overflow, or all are too small.

    Example:
        >>> half = np.dtype(np.float16)
        >>> beyond_half(half, np.float32([-1e30, 1])), beyond_half(half, np.float32(1))
        (<Beyond.LOW: 1>, <Beyond.NONE: 0>)
    """
    found = Beyond.NONE
    for x in constants:
        if x.dtype == np.float32 and x.size < _MOST:
            found |= _beyond(np.asarray(x, np.float64), half)
    return found


def _beyond(wide: np.ndarray, half: np.dtype) -> Beyond:
    wide = wide[np.isfinite(wide)]
    with np.errstate(over="ignore", invalid="ignore"):
        low = wide.astype(half).astype(np.float64)
        if np.linalg.norm(low - wide) <= float(compat.finfo(half).eps) * np.linalg.norm(wide):
            return Beyond.NONE
    below = Beyond.LOW if np.isneginf(low).any() else Beyond.NONE
    above = Beyond.HIGH if np.isposinf(low).any() else Beyond.NONE
    return below | above or Beyond.INSIDE


def beyond_of_result(eqn: Any, operands: Sequence[Inferred | None]) -> Beyond:
    """Where the result of an equation holds such numbers of its operands, if its elements are elements of theirs.

    A maximum is at least as large as a number that fits, and so nowhere below half's range.
    """
    if not primitive(eqn.primitive.name).keeps_values:
        return Beyond.NONE
    found = functools.reduce(operator.or_, (x.beyond for x in operands if x), Beyond.NONE)
    bounded = {"max": Beyond.LOW, "min": Beyond.HIGH}.get(eqn.primitive.name, Beyond.NONE)
    fits = any(x and castable(x) and not x.beyond & bounded for x in operands)
    return found & ~bounded if fits else found


def folded(eqn: Any, known: Mapping[Any, Any]) -> dict[Any, Any]:
    """The results, by variable, that NumPy has of an equation that reads only known constants, or nothing."""
    for v in eqn.invars:
        if not isinstance(v, compat.Literal) and v not in known:
            return {}
    operands = [_number(v) if isinstance(v, compat.Literal) else known[v] for v in eqn.invars]
    return {v: x for v, x in zip(eqn.outvars, _results(eqn, operands), strict=True) if x is not None}


def _number(literal: Any, eqn: Any = None) -> Any:
    return np.asarray(literal.val, literal.aval.dtype)


def _results(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    unknown = [None] * len(eqn.outvars)
    if any(x is None for x in operands) or not all(_is_small(v.aval) for v in eqn.outvars):
        return unknown
    if not primitive(eqn.primitive.name).call:
        return bind_on_host(eqn, operands, wide=False) or unknown
    (sub,) = sub_jaxprs(eqn)
    jaxpr, consts = compat.open_jaxpr(sub.jaxpr)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    return evaluate(jaxpr, env, _results, _number)


def _is_small(aval: Any) -> bool:
    return compat.is_shaped(aval) and all(isinstance(n, int) for n in aval.shape) and compat.numel(aval) < _MOST
