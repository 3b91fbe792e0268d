"""What a program does with gradients that a loss scale multiplies: whether one does, clips, divisions, replacements."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from mpjax.program.dtypes import is_float
from mpjax.program.graph import Site
from mpjax.program.inlining import CONSTANT, Flow, Node, Value
from mpjax.program.primitives import MATMULS, primitive
from mpjax.program.source import BACKWARD

# By name: a clip is a maximum, a minimum, or a `where` of a comparison; `nan_to_num` and `where` are selections.

_LEAST = 1e-4  # Smaller constants guard a division against zero.
_BOUNDS = {"max": "min", "min": "max"}
_LEAST_SCALE = 2**10  # of a static loss scale: a weight that is a power of two may be a batch size
_LARGEST = 0.25  # of the loss scale: a greater constant may be a bound that was multiplied by it


def scaling_risks(flow: Flow) -> Iterator[tuple[str, Site]]:
    """The kinds and the places of risks: gradients that are unscaled, or scaled twice, clipped before they are divided,
    divided twice, applied without the division, or whose inf and NaN are hidden or change no loss scale.
    """
    factors, first = list[_Scaled](), set[Value]()
    for node in _starts(flow):
        first |= flow.after(node.writes[0])
        pairs = zip(node.reads, node.reads[::-1], strict=True) if node.site.name == "mul" else ()
        others = [flow.source(v, repeats) for one, v in pairs if _is_one(flow, one)]
        factors += [_Scaled(flow, node.writes[0], factor) for factor in others[:1]]
    scaled = {value for factor in factors if factor.may_be_scale for value in factor.values}
    backward = [each for each in flow.eqns if each.site.phase == BACKWARD and scaled.isdisjoint(each.reads)]
    marks = [each for each in backward if each.site.name == "unscaled" and each.site.eqn.params.get("backward")]
    halves = [each for each in backward if any(v in first and v.aval.dtype == np.float16 for v in each.reads)]
    matmuls = [each for each in halves if each.site.name in MATMULS]
    # Autocast marks its results. In a program by hand, the first matmul stands for all, or the first operation; a loss
    # that is scaled may have a gradient inside that is not.
    yield from (("unscaled", each.site) for each in marks or (matmuls or halves)[: not scaled])
    yield from (("unchecked", site) for site in _unchecked(flow, any(factor.may_be_scale for factor in factors)))
    wrong = [factor.misapplied() for factor in factors]
    for place, (kind, site) in (pair for found in wrong for pair in found.items()):
        # One of several factors is the loss scale.
        if kind != "scaled" or site.phase == BACKWARD or all(place in other for other in wrong):
            yield kind, site


def _starts(flow: Flow) -> Iterator[Node]:
    """The equations that read the first cotangent of a backward pass."""
    for node in (each for each in flow.eqns if each.site.phase == BACKWARD and each.writes):
        if any(_is_one(flow, v) for v in node.reads) and not any(v.aval.shape for v in node.reads):
            yield node


def follows_cotangent(flow: Flow, node: Node) -> bool:
    """Whether an equation depends on the first cotangent of a backward pass; true where none is seen."""
    starts = [each.writes[0] for each in _starts(flow)]
    return not starts or any(flow.depends(node.reads, start) for start in starts)


class _Scaled:
    """The values that follow from the product of the first cotangent and a factor, which may be a loss scale.

    Attributes:
        values: Those values; not what a division by the factor makes of them.
    """

    def __init__(self, flow: Flow, start: Value, factor: Value):
        self.flow, self.start, self.factor, self.values = flow, start, factor, {start}
        for node in (*flow.eqns, *flow.eqns):  # a loop comes before the equations of its body
            if self._scaled_reads(node):
                self.values.update(node.writes if self._divided(node) is None else ())

    @property
    def may_be_scale(self) -> bool:
        """Whether the factor may be a loss scale: no weight of a loss that is a small constant."""
        return self.factor.constant is None or bool(np.all(np.abs(self.factor.constant) > 2))

    def _clips(self) -> Iterator[Node]:
        """The bounds of scaled values that reach a division by the factor."""

        def through(node: Node) -> Iterable[Value]:
            return [] if node.site.phase == BACKWARD and not node.inner else self._scaled_reads(node)

        dividends = [v for node in self.flow.eqns if (v := self._divided(node)) is not None and v in self.values]
        for node in self.flow.made_by(dividends, through):
            if node.site.phase != BACKWARD and self._is_bounded(node):
                yield node

    def misapplied(self) -> dict[int, tuple[str, Site]]:
        """Where gradients are clipped with the factor, or divided by it again. And of those in half: multiplied by it
        again, applied with it, or applied although nothing tests them for inf and NaN, or no result tells of the test.
        """
        in_half = any(v.aval.dtype == np.float16 for v in self.values)
        is_static, is_argument = self._is_static, self.factor.kind != CONSTANT and self.flow.maker(self.factor) is None
        is_given = in_half and (is_static or is_argument)
        powers, found = {self.start: 1}, {id(node): ("clipped", node.site) for node in self._clips()}
        for node in (*self.flow.eqns, *self.flow.eqns):  # a conditional comes before the equations of its branches
            for inner in node.inner:
                powers |= {v: powers[end] for v, end in zip(node.writes, inner.outputs, strict=False) if end in powers}
            given = [v for v in node.reads if v in powers]
            row, power, kind = primitive(node.site.name), max((powers[v] for v in given), default=0), ""
            if self._divided(node) in given:
                power, kind = power - 1, "" if power else "divided"
            elif is_given and node.site.name == "mul" and any(self._is_factor(v) for v in node.reads if v not in given):
                power, kind = power + 1, "scaled" if power else ""
            elif is_given and row.adds and node.site.phase != BACKWARD and self._is_applied(node, given):
                kind = "scaled" if power else "" if is_static or self._is_checked else "unchecked"
            found |= {id(node): (kind, node.site)} if kind and given else {}
            keeps = repeats(node) or row.adds or row.communicates or node.site.name in ("select_n", "max", "min")
            scales = row.scales and (power < 1 or len(self._scaled_reads(node)) < 2)
            if given and kind != "divided" and (keeps or scales or (node.site.phase == BACKWARD and not node.inner)):
                powers |= dict.fromkeys(node.writes, power)
        return found

    @property
    def _is_static(self) -> bool:
        """Whether the factor is a large power of two, as a static loss scale is."""
        factor = self.factor.constant
        return factor is not None and bool(np.all(np.frexp(factor)[0] == 0.5) and np.all(factor >= _LEAST_SCALE))

    def _is_applied(self, node: Node, gradients: list[Value]) -> bool:
        """Whether an equation adds gradients to an argument or a carry that was read before they were computed."""
        place, starts = self.flow.place, [self.flow.source(v, repeats) for v in node.reads if v not in gradients]
        first = place(self.flow.maker(self.start))
        read = (each for v in starts if self.flow.maker(v) is None for each in self.flow.readers.get(v, ()))
        return any(place(each) < first for each in read)

    @functools.cached_property
    def _is_checked(self) -> bool:
        """Whether a test for inf and NaN changes a scalar result, where it changes the factor."""
        of_tests = self.flow.after(*(node.writes[0] for node in self.flow.eqns if _is_test(node)))
        scalars = {v for v in of_tests & self.flow.after(self.factor) if not v.aval.shape and is_float(v)}
        loops = (node for node in self.flow.eqns if primitive(node.site.name).loop)
        ends = {*self.flow.outputs, *(v for loop in loops for inner in loop.inner for v in inner.outputs)}
        return bool(of_tests) and (not scalars or any(not v.aval.shape for v in of_tests & ends))

    def _scaled_reads(self, node: Node) -> list[Value]:
        """The scaled values that an equation reads, or that the body of a loop returns."""
        return [v for v in (*node.reads, *(v for inner in node.inner for v in inner.outputs)) if v in self.values]

    def _divided(self, node: Node) -> Value | None:
        """What an equation divides by the factor; None if it does not."""
        name, reads = node.site.name, node.reads
        pairs = {"div": (reads,), "mul": (reads, reads[::-1])}.get(name, ()) if node.site.phase != BACKWARD else ()
        return next((v for v, by in pairs if self._is_factor(by, name == "mul")), None)

    def _is_factor(self, value: Value, inverse: bool = False) -> bool:
        """Whether a value is the factor, or one over it."""
        value = self.flow.source(value, repeats)
        node = self.flow.maker(value)
        if inverse and value.constant is None:
            return node is not None and node.site.name == "div" and self._is_factor(node.reads[1])
        if value is not self.factor and node is not None and node.site.name == "mul" and not value.aval.shape:
            return any(map(self._is_factor, {*node.reads}))  # times a number of batches
        if value.constant is None or self.factor.constant is None:
            return value is self.factor
        found, factor = (np.asarray(v.constant, np.float64) for v in (value, self.factor))
        return bool(np.all((found * factor if inverse else found / factor) == 1)) and self.may_be_scale

    def _is_bounded(self, node: Node) -> bool:
        """Whether an equation compares a scaled value with a bound."""
        row, scaled = primitive(node.site.name), self._scaled_reads(node)
        if not (row.compares or node.site.name in ("max", "min", "clamp")) or len(scaled) != 1:
            return False
        ratio = self.flow.maker(self.flow.source(scaled[0], repeats))
        if ratio is not None and ratio.site.name == "div" and ratio.reads[1] in self.values:
            return self._is_bound(ratio.reads[0])  # max_norm / norm, compared with 1
        return any(self._is_bound(v) for v in node.reads if v is not scaled[0])

    def _is_bound(self, value: Value) -> bool:
        """Whether a value is no scaled one, nor one that guards against zero or tests for infinity."""
        if value in self.values:
            return False
        value = self.flow.source(value, repeats)
        if value.constant is None:
            return self.factor.constant is not None or not self.flow.depends([value], self.factor)
        most = np.inf if self.factor.constant is None else _LARGEST * np.abs(self.factor.constant)
        return bool(np.any(np.abs(value.constant) >= _LEAST) and np.all(np.abs(value.constant) < most))


def _is_one(flow: Flow, value: Value) -> bool:
    """Whether a cotangent is 1, up to division by constants: the first one of a backward pass."""

    def scales(node: Node) -> bool:
        return repeats(node) or (node.site.phase == BACKWARD and primitive(node.site.name).scales)

    source = flow.source(value, scales)
    return source.kind == CONSTANT and not value.aval.shape and bool(np.all(np.asarray(source.constant) == 1))


def _unchecked(flow: Flow, is_scaled: bool) -> Iterator[Site]:
    """The operations that replace inf or NaN of gradients by constants before an `is_finite` looks for them.

    If a scaled loss has no such check: the selections that test for inf or NaN themselves.
    """
    ends = (v for node in flow.eqns if (row := primitive(node.site.name)).logic and row.kernel for v in node.reads)
    reduced = {id(node) for node in flow.made_by(ends, _booleans)}
    tests = (node for node in flow.eqns if node.site.name == "is_finite")
    checks = [node for node in tests if id(node) in reduced or not node.writes[0].aval.shape]
    checked = {id(node) for node in flow.before([check.reads[0] for check in checks])}
    for node in flow.eqns:
        may_hide = id(node) in checked if checks else is_scaled and node.site.name == "select_n"
        if may_hide and _replaces(flow, node):
            yield node.site


def _replaces(flow: Flow, node: Node) -> bool:
    """Whether a node replaces elements of a gradient that are not finite, or bounds both ends of it."""
    name, reads = node.site.name, node.reads
    if not node.writes or not is_float(node.writes[0]):
        return False
    if name == "select_n":
        chosen = any(_is_constant(flow, v) for v in reads[1:]) and any(is_gradient(flow, v) for v in reads[1:])
        return chosen and _tests_gradients(flow, reads[0])
    if name == "clamp":
        return is_gradient(flow, reads[1])
    inner = _bounded(flow, node)
    other = flow.maker(inner) if inner is not None else None
    beyond = _bounded(flow, other) if other is not None and _BOUNDS.get(name) == other.site.name else None
    # A bound of a scalar, such as a norm, is no clipping of elements.
    return beyond is not None and bool(node.writes[0].aval.shape) and is_gradient(flow, beyond)


def _bounded(flow: Flow, node: Node) -> Value | None:
    """The operand that a maximum or minimum with a constant bounds."""
    if node.site.name not in _BOUNDS:
        return None
    return next((v for v, bound in zip(node.reads, node.reads[::-1], strict=True) if _is_constant(flow, bound)), None)


def _is_constant(flow: Flow, value: Value) -> bool:
    return flow.source(value, repeats).kind == CONSTANT


def repeats(node: Node) -> bool:
    """Whether an operation only moves, repeats or casts."""
    row = primitive(node.site.name)
    return row.moves or row.whole


def is_gradient(flow: Flow, value: Value) -> bool:
    """Whether a value is a gradient, up to scaling, sums, casts and replaced elements."""

    def through(node: Node) -> Iterable[Value]:
        row = primitive(node.site.name)
        passes = row.scales or row.adds or row.communicates or repeats(node)
        return filter(is_float, node.reads) if passes or node.site.name in ("select_n", *_BOUNDS) else ()

    return any(node.site.phase == BACKWARD for node in flow.made_by([value], through))


def _booleans(node: Node) -> Iterable[Value]:
    return (read for read in node.reads if read.aval.dtype == np.bool_)


def _is_test(node: Node) -> bool:
    """Whether an equation tells which elements are NaN, infinite, or finite."""
    numbers = [c for v in node.reads if (c := v.constant) is not None and not isinstance(c, jax.Array)]
    with_itself, compares = len({*node.reads}) < len(node.reads), primitive(node.site.name).compares
    is_test = compares and (with_itself or not all(np.isfinite(number).all() for number in numbers))
    return is_test or node.site.name == "is_finite"


def _tests_gradients(flow: Flow, mask: Value) -> bool:
    """Whether a mask follows from which elements of gradients are NaN, infinite, or finite."""

    tests = filter(_is_test, flow.made_by([mask], lambda node: () if _is_test(node) else _booleans(node)))
    tested = (read for node in tests for read in node.reads)
    return any(is_gradient(flow, flow.source(read, lambda node: node.site.name == "abs")) for read in tested)
