"""Gradients that are clipped, or compared with a bound, before they are divided by the loss scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from mpjax.inspection.auditing.unchecked import repeats
from mpjax.program.graph import Site
from mpjax.program.inlining import CONSTANT, Flow, Node, Value
from mpjax.program.primitives import primitive
from mpjax.program.source import BACKWARD

# By name: a clip is a maximum, a minimum, or a `where` of a comparison.

_LEAST = 1e-4  # Smaller constants guard a division against zero.
_LARGEST = 0.25  # of the loss scale: a greater constant may be a bound that was multiplied by it


def clipped(flow: Flow) -> Iterator[Site]:
    """The operations that compare scaled gradients with a bound that is not scaled, before they are unscaled."""
    for node in flow.eqns:
        if node.site.phase == BACKWARD and node.site.name == "mul":
            for seed, factor in (node.reads, node.reads[::-1]):
                if _is_constant(flow, seed) and not factor.aval.shape:
                    yield from _Scaled(flow, node.writes[0], _source(flow, factor)).clips()
                    break


@dataclasses.dataclass
class _Scaled:
    """The values that follow from the product of the first cotangent and a factor, which may be a loss scale."""

    flow: Flow
    start: Value
    scale: Value

    def clips(self) -> Iterator[Site]:
        """The bounds of scaled values that reach a division by the factor."""
        self.values, ends = {self.start}, list[Value]()
        for node in (*self.flow.eqns, *self.flow.eqns):  # a loop comes before the equations of its body
            if self._scaled_reads(node):
                divided = self._divided(node)
                ends += divided
                self.values.update(() if divided else node.writes)
        through = lambda node: [] if node.site.phase == BACKWARD and not node.inner else self._scaled_reads(node)  # noqa: E731
        for node in self.flow.made_by(ends, through):
            if node.site.phase != BACKWARD and self._is_bounded(node):
                yield node.site

    def _scaled_reads(self, node: Node) -> list[Value]:
        """The scaled values that an equation reads, or that the body of a loop returns."""
        return [v for v in (*node.reads, *(v for inner in node.inner for v in inner.outputs)) if v in self.values]

    def _divided(self, node: Node) -> list[Value]:
        """The scaled operand of a division by the factor, in a list; empty if the equation is none."""
        reads = node.reads
        if node.site.phase != BACKWARD and node.site.name == "div" and self._is_scale(reads[1]):
            return [reads[0]]
        if node.site.phase != BACKWARD and node.site.name == "mul":
            return [v for v, other in zip(reads, reads[::-1], strict=True) if self._is_scale(other, inverse=True)]
        return []

    def _is_scale(self, value: Value, inverse: bool = False) -> bool:
        """Whether a value is the factor, or one over it."""
        value = _source(self.flow, value)
        if inverse and value.constant is None:
            node = self.flow.maker(value)
            return node is not None and node.site.name == "div" and self._is_scale(node.reads[1])
        if value.constant is None or self.scale.constant is None:
            return value is self.scale
        found, scale = (np.asarray(v.constant, np.float64) for v in (value, self.scale))
        return bool(np.all((found * scale if inverse else found / scale) == 1)) and bool(np.all(scale != 1))

    def _is_bounded(self, node: Node) -> bool:
        """Whether an equation compares a scaled value with a bound."""
        row, scaled = primitive(node.site.name), self._scaled_reads(node)
        if not (row.compares or node.site.name in ("max", "min", "clamp")) or len(scaled) != 1:
            return False
        ratio = self.flow.maker(_source(self.flow, scaled[0]))
        if ratio is not None and ratio.site.name == "div" and ratio.reads[1] in self.values:
            return self._is_bound(ratio.reads[0])  # max_norm / norm, compared with 1
        return any(self._is_bound(v) for v in node.reads if v is not scaled[0])

    def _is_bound(self, value: Value) -> bool:
        """Whether a value is no scaled one, nor one that guards against zero or tests for infinity."""
        if value in self.values:
            return False
        value = _source(self.flow, value)
        if value.constant is None:
            return self.scale.constant is not None or not self.flow.depends([value], self.scale)
        most = np.inf if self.scale.constant is None else _LARGEST * np.abs(self.scale.constant)
        return bool(np.any(np.abs(value.constant) >= _LEAST) and np.all(np.abs(value.constant) < most))


def _source(flow: Flow, value: Value) -> Value:
    found: Value = flow.source(value, repeats)
    return found


def _is_constant(flow: Flow, value: Value) -> bool:
    """Whether a cotangent is one constant, up to scaling: the first one of a backward pass."""
    scales = lambda node: repeats(node) or (node.site.phase == BACKWARD and primitive(node.site.name).scales)  # noqa: E731
    return flow.source(value, scales).kind == CONSTANT and not value.aval.shape
