"""Gradients whose inf and NaN are replaced before a loss scale, or another check of the update, sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mpjax.program.dtypes import is_float
from mpjax.program.graph import Site
from mpjax.program.inlining import CONSTANT, Flow, Node, Value
from mpjax.program.primitives import primitive
from mpjax.program.source import BACKWARD

# By name: `nan_to_num`, `where` and `clip` are comparisons, selections and bounds with constants.

_BOUNDS = {"max": "min", "min": "max"}


def unchecked(flow: Flow) -> Iterator[Site]:
    """The operations by which gradients pass whose inf or NaN they replace by constants, before an `is_finite`."""
    checks = [node for node in flow.eqns if node.site.name == "is_finite"]
    candidates = [node for node in flow.eqns if _replaces(flow, node)] if checks else []
    if candidates:
        checked = {id(node) for node in flow.before([check.reads[0] for check in checks])}
        yield from (node.site for node in candidates if id(node) in checked)


def _replaces(flow: Flow, node: Node) -> bool:
    """Whether a node replaces elements of a gradient that are not finite, or bounds both ends of it."""
    name, reads = node.site.name, node.reads
    if not node.writes or not is_float(node.writes[0]):
        return False
    if name == "select_n":
        chosen = any(_is_constant(flow, v) for v in reads[1:]) and any(_is_gradient(flow, v) for v in reads[1:])
        return chosen and _tests_gradients(flow, reads[0])
    if name == "clamp":
        return _is_gradient(flow, reads[1])
    inner = _bounded(flow, node)
    other = flow.maker(inner) if inner is not None else None
    beyond = _bounded(flow, other) if other is not None and _BOUNDS.get(name) == other.site.name else None
    # A bound of a scalar, such as a norm, is no clipping of elements.
    return beyond is not None and bool(node.writes[0].aval.shape) and _is_gradient(flow, beyond)


def _bounded(flow: Flow, node: Node) -> Value | None:
    """The operand that a maximum or minimum with a constant bounds."""
    if node.site.name not in _BOUNDS:
        return None
    return next((v for v, bound in zip(node.reads, node.reads[::-1], strict=True) if _is_constant(flow, bound)), None)


def _is_constant(flow: Flow, value: Value) -> bool:
    return flow.source(value, lambda node: primitive(node.site.name).whole or repeats(node)).kind == CONSTANT


def repeats(node: Node) -> bool:
    """Whether an operation only moves, repeats or casts."""
    return primitive(node.site.name).moves or node.site.name == "convert_element_type"


def _is_gradient(flow: Flow, value: Value) -> bool:
    """Whether a value is a gradient, up to scaling, sums, casts and replaced elements."""

    def through(node: Node) -> Iterable[Value]:
        row = primitive(node.site.name)
        passes = row.scales or row.adds or row.communicates or repeats(node)
        return filter(is_float, node.reads) if passes or node.site.name in ("select_n", *_BOUNDS) else ()

    return any(node.site.phase == BACKWARD for node in flow.made_by([value], through))


def _tests_gradients(flow: Flow, mask: Value) -> bool:
    """Whether a mask follows from which elements of gradients are NaN, infinite, or finite."""

    def is_test(node: Node) -> bool:
        return node.site.name == "is_finite" or _compares_with_nonfinite(node)

    def through(node: Node) -> Iterable[Value]:
        return () if is_test(node) else (read for read in node.reads if read.aval.dtype == np.bool_)

    tested = (read for node in flow.made_by([mask], through) if is_test(node) for read in node.reads)
    return any(_is_gradient(flow, flow.source(read, lambda node: node.site.name == "abs")) for read in tested)


def _compares_with_nonfinite(node: Node) -> bool:
    if not primitive(node.site.name).compares or len(node.reads) != 2:
        return False
    a, b = node.reads
    constants = [v.constant for v in (a, b) if v.constant is not None]
    return a is b or any(not np.isfinite(np.asarray(c, np.float32)).all() for c in constants)
