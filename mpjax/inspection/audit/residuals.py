"""What the backward pass keeps in memory: values that forward equations make and backward ones read."""

from __future__ import annotations

from collections.abc import Iterator

from mpjax._jaxpr.primitives import Op, primitive
from mpjax._jaxpr.source import FORWARD
from mpjax.inspection.audit.dataflow import Flow, Value


def residuals_of(flow: Flow) -> Iterator[Value]:
    """The values of a program with a gradient in it that are kept from its forward for its backward pass.

    Each counts once, however often it is read. The program's own inputs and constants do not count, for they are kept
    anyway, nor do arrays of one constant, which XLA makes where they are read; a half copy of a weight does. What is
    made and read in the body of a loop counts once, as each turn frees it.
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
