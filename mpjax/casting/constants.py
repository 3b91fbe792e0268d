"""Numbers that a program holds, or makes of nothing else, are known when it is planned: do they fit half?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.casting.classify import EXACT
from mpjax.casting.lattice import FULL, PARAMETER, Inferred, Level
from mpjax.program import compat
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import sub_jaxprs
from mpjax.program.host import bind_on_host
from mpjax.program.primitives import primitive

# Larger constants are weights, in the memory of a device, or masks.
_MOST = 2**16


def constant(x: Any, half: np.dtype) -> Inferred:
    """A constant of the program: castable, if it fits half or is not known (None)."""
    return PARAMETER if x is None or fits(x, half) else Inferred(Level.FLOAT, FULL, large=True)


def out_of_range(half: np.dtype) -> str:
    """The reason for float32 of what reads a constant that does not fit."""
    return f"{EXACT} a constant is outside the range of {half}"


def fits(x: Any, half: np.dtype) -> bool:
    """Whether half represents the finite numbers of a constant: none overflows, and not all are too small."""
    if x.dtype != np.float32 or x.size >= _MOST:
        return True
    wide = np.asarray(x, np.float64)
    wide = wide[np.isfinite(wide)]
    with np.errstate(over="ignore"):
        error = wide.astype(half).astype(np.float64) - wide
    return bool(np.linalg.norm(error) <= float(compat.finfo(half).eps) * np.linalg.norm(wide))


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
