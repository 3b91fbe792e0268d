"""What the dataflow around a fault shows of its cause: constants, indices, derivatives, a softmax, a `where`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpjax.inspection.auditing.amplified import amplified
from mpjax.inspection.auditing.constants import Lost, are_unexplained, lost_constants
from mpjax.inspection.auditing.scaled_gradients import repeats
from mpjax.program.dtypes import is_float
from mpjax.program.inlining import Flow, Node, Value
from mpjax.program.primitives import MATMULS, Op, primitive
from mpjax.program.source import BACKWARD, FORWARD
from mpjax.program.tracing import TracedCall

# By name: each form of a cause has its own operations.


def constants_lost(flow: Flow, node: Node, original: Callable[[], TracedCall], ones: bool) -> tuple[list[Lost], bool]:
    """The constants that rounding made zero or inf; and whether others that the operation reads may be some.

    With `ones`, also those that became one and that the operation depends on, as 1 - 0.999 does.
    """
    reached = set(flow.reached(node.reads))
    nodes, line = [each for each in flow.eqns if not each.inner], node.site.source
    read = [each for each in flow.eqns if each is node or not reached.isdisjoint(each.writes)]
    here = {id(each.site.eqn) for each in (*read, *(each for each in nodes if each.site.source == line))}
    found = [lost for lost in lost_constants(nodes, original, is_float) if lost.written is not None]
    near = [lost for lost in found if id(lost.site.eqn) in here and (ones or abs(lost.value) != 1)]
    unexplained = are_unexplained(each.site for each in nodes if id(each.site.eqn) in here)
    return near or [lost for lost in found if abs(lost.value) != 1], unexplained


def index_out_of_bounds(flow: Flow, node: Node, ranges: Sequence[Any]) -> str:
    """The index with which a gather reads outside of an array, in words; empty if there is none."""
    eqn = node.site.eqn
    if node.site.name != "gather" or len(axes := eqn.params["dimension_numbers"].start_index_map) != 1:
        return ""
    size, (low, high, *_) = eqn.invars[0].aval.shape[axes[0]], ranges[1]
    last = size - eqn.params["slice_sizes"][axes[0]]
    bad = [int(i) for i in (high, low) if not 0 <= i <= last]
    # NumPy's indexing adds the size to a negative one.
    is_move = lambda each: each.site.name in ("reshape", "broadcast_in_dim", "convert_element_type")  # noqa: E731
    maker = flow.maker(flow.source(node.reads[1], is_move))
    added = size if maker is not None and maker.site.name == "select_n" and bad and bad[0] < 0 else 0
    return f"index {bad[0] - added} of an axis of {size}" if bad else ""


def is_of_softmax(flow: Flow, node: Node) -> bool:
    """Whether an equation takes the maximum of a row from the row."""
    if node.site.name != "sub":
        return False
    through = lambda each: each.reads if repeats(each) or each.site.name == "max" else ()  # noqa: E731
    maxima = (each for each in flow.made_by(node.reads[1:], through) if each.site.name == "reduce_max")
    return any(flow.source(each.reads[0], repeats) is flow.source(node.reads[0], repeats) for each in maxima)


def cast_input(flow: Flow, node: Node) -> int | None:
    """The index of the program's input that an equation casts; None if it casts a computed value, or is no cast."""
    if primitive(node.site.name).op is not Op.CONVERT:
        return None
    source = flow.source(node.reads[0], lambda each: primitive(each.site.name).moves)
    return flow.inputs.index(source) if source in flow.inputs else None


def amplified_rounding(flow: Flow, node: Node) -> str:
    """The rounding that an operation amplifies, or one of its line that it depends on, in words; empty if none."""
    before = {id(each.site.eqn) for each in (node, *flow.before(node.reads))}
    found = [each for each in amplified(flow)[0] if each.site.source == node.site.source]
    return next((f"it reads {each.text}" for each in found if id(each.site.eqn) in before), "")


def is_half_over_sqrt(flow: Flow, node: Node) -> bool:
    """Whether an equation is 0.5 / sqrt(x), the derivative of a square root."""
    if node.site.name != "div" or node.reads[0].constant is None or np.any(node.reads[0].constant != 0.5):
        return False
    maker = flow.maker(node.reads[1])
    return maker is not None and maker.site.name == "sqrt"


def is_derivative(flow: Flow, node: Node, of_value: set[int]) -> bool:
    """Whether an equation of the forward pass, or of its recomputation, only computes a derivative.

    Args:
        flow: The program.
        node: The equation.
        of_value: What `primal` finds.
    """
    if node.site.phase == FORWARD:
        return id(node.site.eqn) not in of_value
    is_power = node.site.name in ("pow", "integer_pow")  # of which the derivative is one too
    readers = [reader for v in node.writes for reader in flow.readers.get(v, ())]
    return is_half_over_sqrt(flow, node) or (is_power and all(each.site.phase == BACKWARD for each in readers))


def primal(flow: Flow) -> set[int]:
    """The equations of the forward pass, by `id`, that compute the function's value and not only a derivative."""
    found = set[int]()

    def mark(level: Flow, live: set[Value]) -> None:
        # The value of a function of which only the gradient is used has no reader, or is not computed at all.
        unread = lambda v: v not in flow.readers and v not in level.returned  # noqa: E731
        for node in reversed(level.nodes):
            # No derivative of an elementwise operation has matmuls or reductions.
            computes = node.site.name in MATMULS or primitive(node.site.name).kernel
            is_value = not live.isdisjoint(node.writes) or all(map(unread, node.writes)) or computes
            if node.site.phase != BACKWARD and is_value:
                found.add(id(node.site.eqn))
                for inner in node.inner:
                    # The condition of a `while` returns something else.
                    writes = node.writes if len(node.writes) == len(inner.outputs) else inner.outputs
                    ends = zip(inner.outputs, writes, strict=True)
                    mark(inner, {end for end, v in ends if v in live or v is end or unread(v)})
                live.update(node.reads)

    mark(flow, set(flow.outputs))
    return found


def is_selected(flow: Flow, value: Value) -> bool:
    """Whether a cotangent is one of a `where`, up to factors: zero where the other branch was selected."""

    def through(node: Node) -> Iterable[Value]:
        row = primitive(node.site.name)
        return node.reads if node.site.phase == BACKWARD and (row.moves or row.scales or row.adds) else ()

    return any(node.site.name == "select_n" for node in flow.made_by([value], through))
