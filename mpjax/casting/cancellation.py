"""Differences from a number that a value has where its argument is 0, or at an end: `exp(h) - 1`, `1 + tanh(h)`.

Small arguments are common (a network's layers begin so), and then `exp(h) - 1`, `1 - cos(h)` and `2 * sigmoid(h) - 1`
cancel: rounded before it, nothing of the value is left. So do `1 - tanh(h)²` where `h` is large, and `1 + tanh(h)`, of
a GELU, where all of `h` is about -3, as a bias may have it. `1 - sigmoid(h)`, a gate, is 0.5 at 0, but cancels where
the gate is open. What cancels at one end only is float32 where that keeps nothing more, or where a matmul reads it
(`uses`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, dataflow, once_per_jaxpr
from mpjax.program.graph import sub_jaxprs
from mpjax.program.host import bind_on_host
from mpjax.program.primitives import primitive

# By name: in a difference, the sign of each operand counts.

# Operations between the argument and the difference.
_DEEP = 8


def cancels(jaxpr: Any, eqn: Any, at_one_end: bool) -> bool:
    """Whether an addition or subtraction takes a number from a value that is this number at 0, or at an end.

    Args:
        jaxpr: The program.
        eqn: The addition or subtraction.
        at_one_end: Whether one end is enough.
    """
    for v, other in (eqn.invars, eqn.invars[::-1]):
        number = _number(other)
        if number and not isinstance(v, compat.Literal):
            wanted = number if eqn.primitive.name == "sub" else -number
            near = (_near(values.of(v, _DEEP), wanted) for values in _values(jaxpr))
            return next(near) or (any(near) if at_one_end else all(near))
    return False


def is_centred(jaxpr: Any, v: Any) -> bool:
    """Whether a value's sum, such as its mean, is subtracted from it, which cancels if the mean is large.

    Not a sum over devices: it isn't recomputed, so that the value would be kept in float32.
    """
    flow = dataflow(jaxpr)
    others = [w for eqn in flow.readers.get(v, ()) if eqn.primitive.name == "sub" for w in eqn.invars if w is not v]
    between = ([primitive(eqn.primitive.name) for eqn in flow.between(v, w)] for w in others)
    return any(any(x.risk == "sum" for x in rows) and not any(x.backward.kept for x in rows) for rows in between)


@once_per_jaxpr
def _values(jaxpr: Any) -> list[_Values]:
    return [_Values(dataflow(jaxpr), {}, at) for at in (0.0, np.inf, -np.inf)]


def _near(found: float | None, number: float) -> bool:
    return found is not None and abs(found - number) <= 1e-3 * abs(number)


def _number(v: Any) -> float:
    """The number of a scalar literal; 0 for anything else."""
    return _scalar(v) or 0.0 if isinstance(v, compat.Literal) else 0.0


def _scalar(literal: Any) -> float | None:
    value = np.asarray(literal.val)
    return float(value) if value.ndim == 0 and value.dtype.kind in "fiub" else None


def _kind(v: Any) -> str:
    """The kind of a value's real numbers; empty for complex numbers, and for the keys of random ones."""
    kind = getattr(v.aval.dtype, "kind", "") if compat.is_shaped(v.aval) else ""
    return kind if kind in "fiub" else ""


class _Values:
    """The values of variables where all that is not computed element by element is `at`; None if not known."""

    def __init__(self, flow: Dataflow, env: dict[Any, float | None], at: float):
        self.flow, self.env, self.at = flow, env, at
        self.known: dict[tuple[Any, int], float | None] = {}  # Several paths lead to a value that is read again.

    def of(self, v: Any, depth: int) -> float | None:
        """The value of a variable, after at most `depth` operations."""
        if isinstance(v, compat.Literal):
            return _scalar(v)
        if (v, depth) not in self.known:
            self.known[v, depth] = self._of(v, depth)
        return self.known[v, depth]

    def _of(self, v: Any, depth: int) -> float | None:
        eqn, at = self.flow.maker(v), self.at
        if eqn is None:
            return self.env.get(v, at)
        row = primitive(eqn.primitive.name)
        if not (row.pointwise or row.whole or row.call):
            return at
        if not depth or not _kind(v) or (np.isinf(at) and _kind(v) != "f"):
            return None
        operands = [self.of(x, depth - 1) for x in eqn.invars]
        if row.whole:
            return operands[0]
        if row.call:
            (inner,) = sub_jaxprs(eqn)
            opened = inner.opened
            inside = dict(zip(opened.invars, operands, strict=True))
            out = opened.outvars[eqn.outvars.index(v)]
            return _Values(dataflow(opened), inside, at).of(out, depth - 1)
        known = zip(operands, eqn.invars, strict=True)
        if any(y is None or (np.isinf(y) and _kind(x) != "f") for y, x in known):
            return None
        arrays = [np.asarray(y, x.aval.dtype) for y, x in zip(operands, eqn.invars, strict=True)]
        found = bind_on_host(eqn, arrays, wide=False)
        return float(found[0]) if found and found[0] is not None and np.ndim(found[0]) == 0 else None
