"""Bounds of the values of a program that follow from constants, positions, masks, and arithmetic on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.program import compat
from mpjax.program.inlining import Flow, Node, Value
from mpjax.program.primitives import primitive

# By name: each operation has interval arithmetic of its own.


@dataclasses.dataclass(frozen=True)
class Known:
    """Bounds of a value's elements.

    Args:
        low, high: The lower and upper bound.
        ids: Whether the elements are integer identifiers: positions, ids, labels.
    """

    low: float
    high: float
    ids: bool = False

    @property
    def constant(self) -> bool:
        """Whether all elements are the same number."""
        return self.low == self.high

    @property
    def largest(self) -> float:
        """The greatest magnitude."""
        return max(abs(self.low), abs(self.high))


_TRUTHS = Known(0, 1)
_LARGEST = 2**22


def known_values(flow: Flow) -> dict[Value, Known]:
    """The known bounds of each value of a program, including its sub-jaxprs."""
    known: dict[Value, Known] = {}

    def of(value: Value) -> Known | None:
        if value in known or value.constant is not None:
            return known.get(value) or _constant(value)
        return _TRUTHS if compat.is_shaped(value.aval) and value.aval.dtype == np.bool_ else None

    for node in flow.eqns:
        if len(node.writes) == 1 and (found := _result(node, [of(value) for value in node.reads])):
            known[node.writes[0]] = found
    return known


def _constant(value: Value) -> Known | None:
    array = value.constant
    if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return None
    # Closed-over weights are too large to scan, and their bounds are of no use.
    if not compat.is_shaped(value.aval) or not 0 < value.aval.size <= _LARGEST:
        return None
    if not (jnp.issubdtype(value.aval.dtype, jnp.number) or value.aval.dtype == bool):
        return None
    array = np.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return None
    low, high = float(array.min()), float(array.max())
    return None if math.isnan(low) else Known(low, high)


def _result(node: Node, operands: Sequence[Known | None]) -> Known | None:
    name, params, row = node.site.name, node.site.eqn.params, primitive(node.site.name)
    if name == "iota":
        return Known(0, params["shape"][params["dimension"]] - 1, ids=True)
    if name in _ARITHMETIC:
        return None if None in operands else _arithmetic(_ARITHMETIC[name], [x for x in operands if x])
    return _union([operands[i] for i in row.sources(len(operands))]) if row.keeps_values else None


def _union(operands: Sequence[Known | None]) -> Known | None:
    found = [operand for operand in operands if operand]
    if len(found) < len(operands):
        return None
    return Known(min(k.low for k in found), max(k.high for k in found), _ids(found))


def _ids(operands: Sequence[Known | None]) -> bool:
    return any(operand.ids for operand in operands if operand)


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
}


def _arithmetic(operation: Callable[..., float], operands: Sequence[Known]) -> Known | None:
    """Interval arithmetic: these operations take their extremes at the corners."""
    if not all(math.isfinite(operand.largest) for operand in operands):
        return None
    corners = [operation(*corner) for corner in itertools.product(*((k.low, k.high) for k in operands))]
    # A position times 0.5 is a fraction, not an id.
    whole = all(operand.ids or float(operand.low).is_integer() for operand in operands)
    return Known(min(corners), max(corners), whole and _ids(operands))
