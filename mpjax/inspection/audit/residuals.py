"""Residuals: values that forward equations compute and backward equations read."""

from __future__ import annotations

from collections.abc import Iterator

from mpjax._jaxpr.primitives import Op, primitive
from mpjax._jaxpr.source import FORWARD
from mpjax.inspection.audit.dataflow import Flow, Value


def residuals_of(flow: Flow) -> Iterator[Value]:
    """The values that a program with a gradient keeps from its forward pass for its backward pass.

    Each value counts once, however often it is read. The program's inputs and constants do not count: they are kept
    anyway. Arrays filled with one constant do not count either: XLA creates them where they are read. A half copy of a
    weight counts. Residuals within a loop's body count once, as each iteration frees them.
    """
    forward: set[Value] = set()
    filled: set[Value] = set()
    kept: dict[Value, None] = {}
    for node in flow.nodes:
        if node.site.phase != FORWARD:
            kept |= dict.fromkeys(value for value in map(_whole, node.reads) if value in forward)
            continue
        row = primitive(node.site.name)
        fills = row.whole or row.op is Op.CONVERT
        if fills and all(value.constant is not None or value in filled for value in node.reads):
            filled.update(node.writes)
        else:
            forward.update(node.writes)
        for inner in node.inner:
            yield from residuals_of(inner)
    yield from kept


def _whole(value: Value) -> Value:
    return value if value.whole is None else _whole(value.whole)
