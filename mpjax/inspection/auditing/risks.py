"""Half operations that need float32's range or digits."""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpjax.inspection.auditing.amplified import SUMS, Amplified, Facts, amplified, ends_of, exact_up_to, terms_of
from mpjax.inspection.auditing.constants import Lost, extreme, lost_constants, rounded, rounded_text
from mpjax.inspection.auditing.scaled_gradients import is_gradient, repeats, scaling_risks
from mpjax.inspection.reports import by_key
from mpjax.program import compat
from mpjax.program.dtypes import is_float, is_half
from mpjax.program.graph import Site, sub_jaxprs
from mpjax.program.inlining import COMPUTED, CONSTANT, INPUT, Flow, Node, Value
from mpjax.program.primitives import MATMULS, Op, drops_axes, primitive
from mpjax.program.source import BACKWARD
from mpjax.program.tracing import TracedCall

# By name: each risk is a form, in which the place of each operand counts.

# Most severe first: inf, NaN or wrong results before lost digits.
_FILE = pathlib.Path(__file__).with_suffix(".csv")
MEANINGS = {row["kind"]: row["meaning"] for row in csv.DictReader(_FILE.read_text("utf-8").splitlines())}


@dataclasses.dataclass(frozen=True)
class Risk:
    """Operations of one line of the program that half precision may make inaccurate.

    Args:
        kind: `"unscaled"`: a float16 backward pass without loss scaling, or a loss scale that no gradient uses;
            `"clipped"`: gradients are compared with a bound before they are divided by the loss scale;
            `"divided"`: gradients are divided by the loss scale a second time;
            `"scaled"`: a loss is multiplied by the loss scale twice, or gradients are applied that were not divided;
            `"unchecked"`: inf or NaN of float16 gradients is replaced, and no check for finite values sees it, or there
            is no check, or the loss scale that it changes is not returned;
            `"exp"`, `"log"`, `"pow"`, `"sum"`, `"softmax"`, `"loss"`: computed in half;
            `"wraps"`: a sum, difference or matmul of integers of 8 or 16 bits whose result has as few;
            `"overflow"`: a finite constant (an additive mask) becomes infinite in half;
            `"epsilon"`: a constant becomes zero in half; `"constant"`: a constant near 1 becomes 1;
            `"norm"`: a norm in float16, which overflows from 256 on;
            `"update"`: a value is stored in half and changed by small amounts (weights, a moving average);
            `"accumulator"`: a loop's carry to which terms are added in half;
            `"ids"`: integer identifiers that become equal in half;
            `"amplified"`: a value is rounded to half at one line, and its error is amplified at this one.
        module, source, op: The module path, the line and the primitive.
        dtype: The half dtype, or that of the integers.
        phases: A subset of `"forward"`, `"backward"`, `"recomputed"`.
        count: Number of executions.
        why: The possible failure.
    """

    kind: str
    module: str
    source: str
    op: str
    dtype: str
    phases: tuple[str, ...]
    count: int
    why: str


def risks_of(flow: Flow, original: Callable[[], TracedCall]) -> tuple[Risk, ...]:
    """The risks of a program, merged by kind, module, line, operation and dtype, the most severe first.

    Args:
        flow: The program.
        original: Traces it in a wider dtype.
    """
    nodes = flow.eqns
    of_amplified, known = amplified(flow)
    found: list[RiskySite] = []
    if any(v.aval.dtype == np.float16 for node in nodes for v in node.writes if is_float(v)):
        found += [(kind, site, "float16", MEANINGS[kind]) for kind, site in scaling_risks(flow)]
    roundings = [*_amplified(of_amplified)]
    found += [*roundings, *_operations(flow, {_place(site) for _, site, _, _ in roundings}, known), *_loss(flow)]
    widened = {id(node) for node in _widened(flow)}
    for node in nodes:
        found += _constants(node, known)
        found += _wraps(flow, node, known) if node.site.name in SUMS or id(node) in widened else ()
    readers = (node for node in nodes if primitive(node.site.name).op is not Op.CONVERT)
    found += _lost(nodes, lost_constants(readers, original))
    return _merged([*found, *_norms(flow, known), *_updates(flow, known), *_accumulators(flow, known)])


RiskySite = tuple[str, Site, str, str]  # kind, site, dtype, why


def _operations(flow: Flow, amplified: set[tuple[str, str]], known: Callable[[Value], Facts]) -> Iterator[RiskySite]:
    """Half operations that need float32. Those of a softmax are reported as one; logarithms that amplify, before."""

    def is_noise(node: Node) -> bool:
        """Whether it reads random numbers; a logarithm of some that are zero is a risk."""
        return any(facts.is_random and (node.site.name != "log" or facts.low) for facts in map(known, node.reads))

    risky = [(node, dtype) for node in flow.eqns if not is_noise(node) and (dtype := _risky(node))]
    maxima = {_place(node.site) for node in flow.eqns if node.site.name == "reduce_max"}
    softmaxes = {_place(node.site) for node, _ in risky if primitive(node.site.name).risk == "exp"} & maxima

    def of_sum(value: Value) -> bool:
        """Whether a value is a sum, as in log_softmax, and not a probability."""
        node = flow.maker(flow.source(value, repeats))
        return node is not None and node.site.name == "reduce_sum"

    for node, dtype in risky:
        name = node.site.name
        of_softmax = name in ("exp", "reduce_sum") or (name == "log" and of_sum(node.reads[0]))
        kind = "softmax" if of_softmax and _place(node.site) in softmaxes else primitive(name).risk
        if kind in ("log", "pow") and _place(node.site) in amplified:
            continue
        of_noise = f"one of {2 ** (_digits(dtype) - 1)} random numbers in {dtype} is 0: draw them in float32"
        yield kind, node.site, dtype, of_noise if known(node.reads[0]).is_random else MEANINGS[kind]


def _risky(node: Node) -> str:
    """The half dtype that a risky operation reads; empty for other operations."""
    if not primitive(node.site.name).risk or drops_axes(node.site.eqn):
        return ""
    return next((v.aval.dtype.name for v in node.reads if is_half(v)), "")


def _place(site: Site) -> tuple[str, str]:
    return site.path, site.line


def _loss(flow: Flow) -> Iterator[RiskySite]:
    """Scalar results in half: a loss or a metric."""
    for value in dict.fromkeys(flow.outputs):
        is_scalar = is_half(value) and not value.aval.shape
        if is_scalar and (node := flow.maker(value)) is not None and not _counts(flow, node):
            yield "loss", node.site, value.aval.dtype.name, MEANINGS["loss"]


def _constants(node: Node, known: Callable[[Value], Facts]) -> Iterator[RiskySite]:
    """Constants that overflow, vanish or lose digits in half."""
    row = primitive(node.site.name)
    if row.op is Op.CONVERT:
        yield from _cast(node, known)
    elif row.adds or row.scales:
        for value in node.reads:
            # JAX has already rounded the constant to the dtype of the half array.
            if is_half(value) and value.constant is not None and np.isinf(np.asarray(value.constant)).any():
                fits = extreme(np.sum(value.constant, dtype=np.float64)) + " a mask, float32 a factor" * row.scales
                why = f"a constant is beyond {value.aval.dtype.name}'s range; {fits}"
                yield "overflow", node.site, value.aval.dtype.name, why
    elif node.site.name == "iota" and is_half(node.writes[0]):
        yield from _inexact(node.site, node.writes[0].aval.dtype, known(node.writes[0]))


def _is_small_integer(value: Value) -> bool:
    return compat.is_shaped(value.aval) and math.isfinite(ends_of(value.aval.dtype)[0])


def _widened(flow: Flow) -> Iterable[Node]:
    """The equations of small integers whose results become floats or larger integers, but not through a `where`."""

    def through(node: Node) -> Iterable[Value]:
        return filter(_is_small_integer, node.reads if node.site.name != "select_n" else ())

    casts = (node for node in flow.eqns if primitive(node.site.name).op is Op.CONVERT)
    ends = (v for node in casts if not _is_small_integer(node.writes[0]) for v in through(node))
    return flow.made_by(ends, through)


_MUCH_OF_RANGE = 0.25  # Bounds of labels with an offset leave it by less, and their values seldom do.


def _wraps(flow: Flow, node: Node, known: Callable[[Value], Facts]) -> Iterator[RiskySite]:
    """Sums, matmuls and differences of small integers whose bounds are beyond the dtype of the result."""
    out, name = node.writes[0], node.site.name
    if not all(map(_is_small_integer, (out, *node.reads))):
        return
    dtype, found, (least, most) = out.aval.dtype.name, known(out), ends_of(out.aval.dtype)
    if name in SUMS:
        sizes = [min(known(v).largest, max(map(abs, ends_of(v.aval.dtype)))) for v in node.reads]
        terms, what = terms_of(node.site), " × ".join(f"{size:.0f}" for size in sizes)
        if terms * math.prod(sizes) > most:
            yield "wraps", node.site, dtype, _wrapped(terms, what, out.aval.dtype)
    elif primitive(name).adds and math.isfinite(found.largest):
        makers = [flow.maker(flow.source(v, repeats)) for v in node.reads]
        # The differences max(x) - x and x - min(x) do not wrap.
        is_ordered = any(m and bound in m.site.name for m, bound in zip(makers, ("max", "min"), strict=True))
        if max(least - found.low, found.high - most) > _MUCH_OF_RANGE * (most - least) and not is_ordered:
            why = f"results from {found.low:.0f} to {found.high:.0f} in {dtype}: convert the operands, not the result"
            yield "wraps", node.site, dtype, why


def _wrapped(terms: int, size: str, dtype: Any) -> str:
    return f"{terms} terms of up to {size} in {dtype.name}, which ends at {ends_of(dtype)[1]:.0f}"


def _cast(node: Node, known: Callable[[Value], Facts]) -> Iterator[RiskySite]:
    source, target = node.reads[0], node.writes[0]
    value = known(target)
    if is_half(target) and value.written and not is_half(source):
        limits, dtype = compat.finfo(target.aval.dtype), target.aval.dtype.name
        if math.isfinite(value.largest) and value.largest > float(limits.max):
            worst = value.low if abs(value.low) == value.largest else value.high
            why = f"{worst:.4g} is beyond {dtype}'s {float(limits.max):.4g}; {extreme(worst)}"
            yield "overflow", node.site, dtype, why
        elif value.is_constant and value.low not in (0, 1) and (held := rounded(value.low, dtype)) in (0, 1):
            yield "constant" if held else "epsilon", node.site, dtype, rounded_text(value.low, dtype)
        else:
            yield from _inexact(node.site, target.aval.dtype, value)


def _inexact(site: Site, dtype: Any, value: Facts) -> Iterator[RiskySite]:
    """Ids larger than the integers that a half dtype represents exactly."""
    exact = exact_up_to(dtype)
    if value.ids and value.whole and not value.is_constant and value.largest > exact:
        why = f"whole numbers up to {value.largest:.0f}; {dtype.name} holds all up to {exact} only"
        yield "ids", site, dtype.name, why


def _lost(nodes: Sequence[Node], lost: Iterable[Lost]) -> Iterator[RiskySite]:
    """Constants that half rounds to 0 or 1; where it is not known what was written, zeros that guard a pole."""
    found = {(id(constant.site.eqn), constant.operand): constant for constant in lost}
    guarded: dict[Value, tuple[str, Lost]] = {}
    for node in nodes:
        name, reads = node.site.name, node.reads
        constants = [found[key] for i in range(len(reads)) if (key := (id(node.site.eqn), i)) in found]
        for constant in constants:
            if constant.written is None:
                guarded[node.writes[0]] = name, constant
            elif math.isfinite(constant.value):
                yield "constant" if constant.value else "epsilon", node.site, constant.dtype, constant.text
            elif not (primitive(name).adds or primitive(name).scales):
                yield "overflow", node.site, constant.dtype, f"{constant.text}; {extreme(constant.value)}"
        at_risk = reads[1:2] if name == "div" else reads[:1] if name in ("log", "rsqrt", "sqrt", "pow") else ()
        for value in at_risk:
            by, zero = guarded.get(value, ("", None))
            # max(x, 0) before a square root deliberately guards against negative numbers.
            if zero is not None and by in ("add", "max") and (by, name) != ("max", "sqrt"):
                yield "epsilon", zero.site, zero.dtype, f"{zero.text} this {name}"


def _norms(flow: Flow, known: Callable[[Value], Facts]) -> Iterator[RiskySite]:
    """Square roots of sums of squares in float16, which may be beyond its range."""

    def through(node: Node) -> Iterable[Value]:
        row = primitive(node.site.name)
        return node.reads if repeats(node) or row.adds or row.risk == "sum" else ()

    def is_square(node: Node) -> bool:
        is_product = node.site.name == "mul" and node.reads[0] is node.reads[1]
        return node.site.name == "square" or node.site.eqn.params.get("y") == 2 or is_product

    for node in flow.eqns:
        is_root = node.site.name == "sqrt" and node.reads[0].aval.dtype == np.float16
        if is_root and known(node.reads[0]).largest > 65504 and any(map(is_square, flow.made_by(node.reads, through))):
            yield "norm", node.site, "float16", MEANINGS["norm"]


def _amplified(roundings: Iterable[Amplified]) -> Iterator[RiskySite]:
    """Values that are rounded to half and then amplified, by an operation of float32 or of half."""
    for found in roundings:
        in_half = any(map(is_half, found.site.invars)) and primitive(found.site.name).risk
        kind = "ids" if found.rounding.of_whole else in_half or "amplified"
        yield kind, found.site, found.dtype, found.text


# Largest factor of an update (a learning rate), and smallest factor that keeps the old value (a moving average).
_SMALL_FACTOR, _KEEPING_FACTOR = 0.05, 0.9


def _updates(flow: Flow, known: Callable[[Value], Facts]) -> Iterator[RiskySite]:
    """Small multiples of a value that are added to a half argument, or a loop's carry: half may round them away."""

    def is_start(value: Value, before: Value | None) -> bool:
        return is_half(value) and (value.kind == INPUT if before is None else value is before)

    def is_kept(value: Value, before: Value | None) -> bool:
        """Whether it is a half start, or most of one."""
        factors = _factors(flow, value, known)
        parts = (part for facts, part in factors if facts.is_constant and facts.low >= _KEEPING_FACTOR)
        return any(all(is_start(v, before) for v in _sources(flow, old)) for old in (value, *parts))

    of_calls = ((None, value, None) for value in dict.fromkeys(flow.outputs))
    of_loops = ((before, after, loop.inner[-1].inputs) for loop, before, after in _carries(flow))
    for before, value, given in (*of_calls, *of_loops):
        made = [node for node in map(flow.maker, _sources(flow, value)) if node is not None]
        node = made[0] if len(made) == 1 else None  # One of several may be rounded in another way: stochastically.
        if not is_half(value) or node is None or not primitive(node.site.name).adds or len(node.reads) != 2:
            continue
        pairs = node.reads, node.reads[::-1]
        added = [
            (old, new) for old, new in pairs if is_kept(old, before) and not _is_layer(flow, node, old, new, given)
        ]
        steps = [step for _, new in added if (step := _known_factor(flow, new, known)) is not None]
        if steps and min(steps) <= _SMALL_FACTOR:
            dtype = value.aval.dtype
            why = f"a multiple of {min(steps):.2g} is added to a {dtype.name} value, which has {_digits(dtype)} bits"
            yield "update", node.site, dtype.name, why


def _is_layer(flow: Flow, end: Node, old: Value, new: Value, given: Sequence[Value] | None) -> bool:
    """Whether a term is a branch of a residual stream: matmuls of the other term, outside of a backward pass.

    A gradient by formulas contracts an operand of these matmuls once more, along its other axes, after a difference, or
    is subtracted: w + x.T @ (y - x @ w).
    In a loop, of which `given` are the inputs, layers have weights of their own: with the same, it integrates.
    """

    def forward(node: Node) -> Iterable[Value]:
        return () if node.site.phase == BACKWARD else node.reads

    def contracted(value: Value, axes: Iterable[int]) -> tuple[Value, frozenset[int]]:
        """The axes along which a value is contracted, seen through transpositions."""
        while (node := flow.maker(value)) is not None and node.site.name in ("transpose", "convert_element_type"):
            order, (value,) = node.site.eqn.params.get("permutation"), node.reads
            axes = [order[axis] for axis in axes] if order else axes
        return value, frozenset(axes)

    def depends(values: Iterable[Value]) -> bool:
        return any(flow.depends(values, start) for start in starts)

    starts = [*_sources(flow, old)]
    made = (node for node in flow.made_by([new], forward) if node.site.name in MATMULS)
    matmuls = [node for node in made if node.site.phase != BACKWARD and depends(node.reads)]
    dots = [node for node in matmuls if node.site.name == "dot_general"]
    pairs = {
        contracted(*pair) for n in dots for pair in zip(n.reads, n.site.eqn.params["dimension_numbers"][0], strict=True)
    }
    weights = [value for value, _ in pairs if not depends([value])]
    changes = [v for v in given or () if v.kind == COMPUTED and flow.maker(v) is None]
    is_own = given is None or any(flow.depends(weights, v) for v in changes)
    later = (node for dot in dots for node in (end, *flow.between(dot.writes[0], new)))
    by_formulas = len(pairs) > len({value for value, _ in pairs}) and any(each.site.name == "sub" for each in later)
    return bool(matmuls) and is_own and not by_formulas


def _carries(flow: Flow) -> Iterator[tuple[Node, Value, Value]]:
    """The loops, each with the values of a carry before and after an iteration."""
    for node in flow.eqns:
        if primitive(node.site.name).loop:
            body = sub_jaxprs(node.site.eqn)[-1]
            carry = node.inner[-1].inputs[body.consts : body.consts + body.carry]
            yield from ((node, *ends) for ends in zip(carry, node.inner[-1].outputs, strict=False))


def _accumulators(flow: Flow, known: Callable[[Value], Facts]) -> Iterator[RiskySite]:
    """Sums over the iterations of a loop, and of gradients or counts over calls, stored in half after each term."""
    for node, before, after in _carries(flow):
        length = node.site.eqn.params.get("length")
        yield from _added_to(node.inner[-1], before, after, length, known)
        adder, terms = flow.maker(flow.source(after, repeats)), length or 0
        if adder is not None and before in adder.reads and primitive(adder.site.name).adds:
            sizes, (_, most) = [known(v).largest for v in adder.reads if v is not before], ends_of(before.aval.dtype)
            size = max(sizes, default=math.inf)
            if math.isfinite(size) and terms * size > most:
                yield "wraps", adder.site, before.aval.dtype.name, _wrapped(terms, f"{size:.0f}", before.aval.dtype)
    for value in filter(is_half, flow.outputs):
        node, dtype = flow.maker(flow.source(value, repeats)), value.aval.dtype
        terms = [flow.source(v, repeats) for v in node.reads] if node is not None else []
        starts = [v for v in terms if v.kind == INPUT and is_half(v)]
        is_added = node is not None and primitive(node.site.name).adds and bool(starts)
        # Gradients of what they are added to update it.
        others = (v for v in terms if not any(flow.depends([v], start) for start in starts))
        of_gradients = any(is_gradient(flow, v) for v in others)
        if is_added and (of_gradients or _is_reduction(flow, terms) or _is_running_mean(flow, terms)):
            yield "accumulator", node.site, dtype.name, _summed("calls", dtype)
        elif node is not None and _counts(flow, node):
            why = f"a count in {dtype.name} stops at {exact_up_to(dtype)}: keep it in int32 or float32"
            yield "accumulator", node.site, dtype.name, why
        elif of_gradients and node.site.name == "reduce_sum" and dtype == np.float16:
            yield "sum", node.site, dtype.name, "a sum of gradients that is cast to float16, which overflows at 65504"
    yield from _unrolled(flow)


def _counts(flow: Flow, node: Node) -> bool:
    """Whether it adds a constant to a number that is an argument."""
    terms = [flow.source(v, repeats) for v in node.reads]
    is_sum = primitive(node.site.name).adds and len(terms) == 2 and not node.writes[0].aval.shape
    return is_sum and {v.kind for v in terms} == {INPUT, CONSTANT}


def _is_reduction(flow: Flow, terms: Iterable[Value]) -> bool:
    """Whether one of the terms of a sum is a sum or a mean of a batch itself, such as a count or a metric."""
    sources = (flow.source(v, lambda node: repeats(node) or primitive(node.site.name).scales) for v in terms)
    return any(maker.site.name == "reduce_sum" for v in sources if (maker := flow.maker(v)) is not None)


def _is_running_mean(flow: Flow, terms: Sequence[Value]) -> bool:
    """Whether one of the terms of a sum is a difference from another, divided by a count."""
    for quotient in (node for v in terms if (node := flow.maker(v)) is not None and node.site.name == "div"):
        count = flow.source(quotient.reads[1], repeats)
        node, difference = flow.maker(count), flow.maker(flow.source(quotient.reads[0], repeats))
        is_count = (node is not None and _counts(flow, node)) or (count.kind == INPUT and count.aval.dtype.kind in "iu")
        if is_count and difference is not None and difference.site.name == "sub":
            return flow.source(difference.reads[1], repeats) in terms
    return False


def _sources(flow: Flow, value: Value) -> Iterator[Value]:
    """The values that a value is, seen through moves, casts, selections and the branches of a conditional."""
    waiting, seen = [value], set[Value]()
    while waiting:
        if (value := waiting.pop()) in seen:
            continue
        seen.add(value)
        node = flow.maker(value)
        if node is None or not (repeats(node) or node.site.name in ("cond", "top_k", "gather", "select_n")):
            yield value
        elif node.site.name == "cond":
            waiting += (branch.outputs[node.writes.index(value)] for branch in node.inner)
        else:
            waiting += node.reads[1:] if node.site.name == "select_n" else node.reads[:1]


def _factors(flow: Flow, value: Value, known: Callable[[Value], Facts]) -> Iterator[tuple[Facts, Value]]:
    """The factors of known size of the products that a value is, each with the other factor."""
    for node in filter(None, map(flow.maker, _sources(flow, value))):
        pairs = zip(node.reads, node.reads[::-1], strict=True) if node.site.name == "mul" else ()
        yield from ((known(number), other) for number, other in pairs if math.isfinite(_size(known(number))))


def _known_factor(flow: Flow, value: Value, known: Callable[[Value], Facts]) -> float | None:
    """The product of the factors of known size of a product, at any depth; None if there are none."""
    if math.isfinite(size := _size(known(value))):
        return size
    makers = (node for node in map(flow.maker, _sources(flow, value)) if node is not None and node.site.name == "mul")
    factors = ([_known_factor(flow, v, known) for v in node.reads] for node in makers)
    found = ([factor for factor in each if factor is not None] for each in factors)
    return min((math.prod(sizes) for sizes in found if sizes), default=None)


def _size(facts: Facts) -> float:
    """The greatest magnitude; that of the known end if the other is unknown, as in `min(1e-3, 1e-5 * count)`."""
    ends = (end for end in (facts.high, -facts.low) if 0 < end < math.inf)
    return facts.largest if math.isfinite(facts.largest) else min(ends, default=math.inf)


def _added_to(
    flow: Flow, before: Value, after: Value, length: int | None, known: Callable[[Value], Facts]
) -> Iterator[RiskySite]:
    """The additions to a half value that make it a sum or a running mean of other values, and no residual stream."""
    dtype = before.aval.dtype
    if not is_half(before) or after.aval.dtype != dtype:
        return
    dependent, least = flow.after(before), 1 - 2.0 ** (3 - _digits(dtype))

    def sources(value: Value) -> Iterator[Value]:
        """The values that a value is, up to a decay too slow for the digits of the dtype."""
        yield from _sources(flow, value)
        for factor, other in _factors(flow, value, known):
            yield from sources(other) if factor.is_constant and least <= factor.low <= 1 else ()

    @functools.cache
    def transformed(value: Value) -> bool:
        """Whether a value depends on a start through more than differences and scalings.

        A gate, an array, makes the next value forget most of what was rounded.
        """
        node = flow.maker(value)
        if node is None:
            return False
        row, factors = primitive(node.site.name), [flow.source(v, repeats) for v in node.reads if v not in dependent]
        scales = row.scales and all(v.kind == CONSTANT or not v.aval.shape for v in factors)
        is_scaling = row.moves or row.adds or row.whole or scales
        return any(map(transformed if is_scaling else dependent.__contains__, node.reads))

    for result in dict.fromkeys(sources(after)):
        node = flow.maker(result)
        if node is None or not primitive(node.site.name).adds or len(node.reads) != 2:
            continue
        old, new = sorted(node.reads, key=lambda value: before not in sources(value))
        # A count that the dtype holds is exact.
        counts = known(new).is_constant and known(new).low.is_integer()
        is_exact = counts and (length or math.inf) * known(new).largest <= exact_up_to(dtype)
        if before in sources(old) and not is_exact and not transformed(new):
            times = "iterations" if length is None else f"{length} iterations"
            yield "accumulator", node.site, dtype.name, _summed(times, dtype)


def _digits(dtype: Any) -> int:
    """The bits of a dtype's significand, including the leading bit."""
    return exact_up_to(dtype).bit_length() - 1


_MANY_TERMS = 8


def _unrolled(flow: Flow) -> Iterator[RiskySite]:
    """The ends of long sums, term by term, as a loop of Python makes them."""

    def addition(value: Value) -> Node | None:
        node: Node | None = flow.maker(flow.source(value, repeats))
        return node if node is not None and node.site.name == "add" and is_half(node.writes[0]) else None

    terms: dict[int, int] = {}  # the number of each addition's, by `id`
    ends: dict[int, Node] = {}
    for node in (each for each in flow.eqns if each.writes and id(addition(each.writes[0])) == id(each)):
        old, new = sorted(node.reads, key=lambda value: addition(value) is None)
        before = addition(old)
        earlier = terms[id(before)] if before is not None else 1
        # A term that depends on the sum so far is that of a residual stream.
        is_stream = before is not None and flow.depends([new], before.writes[0])
        terms[id(node)] = 0 if is_stream else earlier + 1
        ends.pop(id(before), None)
        ends[id(node)] = node
    for end in ends.values():
        if (count := terms[id(end)]) >= _MANY_TERMS:
            dtype = end.writes[0].aval.dtype
            yield "accumulator", end.site, dtype.name, _summed(f"{count} terms", dtype)


def _summed(times: str, dtype: Any) -> str:
    return f"summed over {times} in {dtype.name}, which has {_digits(dtype)} bits: keep the sum in float32"


def _merged(found: Iterable[RiskySite]) -> tuple[Risk, ...]:
    merged = []
    places = (
        ((kind, *_place(site), kind if kind == "softmax" else site.name, dtype), (site, why))
        for kind, site, dtype, why in found
    )
    for place, alike in by_key(places).items():
        sites, reasons = zip(*alike, strict=True)
        phases, why = tuple(dict.fromkeys(site.phase for site in sites)), "; ".join(dict.fromkeys(reasons))
        merged.append(Risk(*place, phases, sum(site.times for site in sites), why))
    return tuple(sorted(merged, key=lambda risk: list(MEANINGS).index(risk.kind)))
