"""Values that are rounded to half and then amplified: the operation that rounds, and the one that amplifies.

An abstract interpretation. A rounding is followed through operations that keep it (moves, sums of two, products), until
a reduction averages it away or an amplifier reads it:

    log, rsqrt, sin, acos, ...      near a zero or a pole, or for large arguments (`Primitive.worst`)
    1 / d, log(d), ...              if d is a difference of near-equal numbers, as 1 - tanh(u)²
    a conversion to integers        one unit apart is another index
    a decomposition or a solve      multiplies the error by the condition number

A matmul averages what it reads, so the rounding of its operands only matters to the last two, which need an exact
result; and where an operand holds whole numbers (positions, labels).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.program import compat
from mpjax.program.dtypes import is_float, is_half
from mpjax.program.graph import Site, is_entered
from mpjax.program.inlining import CONSTANT, INPUT, Flow, Node, Value
from mpjax.program.primitives import MATMULS, Op, drops_axes, is_product, primitive
from mpjax.program.source import FORWARD

# By name: how much an operation amplifies is its own formula.


class Rounding(NamedTuple):
    """The operation that rounded a value to half; whether it was of whole numbers, or a size that a term reduces."""

    site: Site
    of_whole: bool = False
    of_size: bool = False


class Facts(NamedTuple):
    """What is known of a value.

    Args:
        rounded: The rounding of its elements to half, if no reduction followed.
        matmul: The half matmul whose result it is, up to affine operations.
        difference: The difference of near-equal rounded numbers that it is, up to scaling.
        low, high: Bounds of its elements.
        whole: Whether its elements are integers by construction: positions, labels, counts.
        summed: Whether it is a sum, as the denominator of a softmax.
        written: Whether its elements follow from constants and positions alone, so that the bounds are met.
        ids: Whether they follow from positions.
    """

    rounded: Rounding | None = None
    matmul: Rounding | None = None
    difference: Rounding | None = None
    low: float = -math.inf
    high: float = math.inf
    whole: bool = False
    summed: bool = False
    written: bool = False
    ids: bool = False

    def joined(self, other: Facts) -> Facts:
        """The facts of a value that is one of two."""
        return Facts(
            self.rounded or other.rounded,
            self.matmul or other.matmul,
            self.difference or other.difference,
            self.low if other.low >= self.low else -math.inf,  # unknown, as it may change with each iteration
            self.high if other.high <= self.high else math.inf,
            self.whole and other.whole,
            self.summed and other.summed,
            self.written and other.written and (self.low, self.high) == (other.low, other.high),
            self.ids or other.ids,
        )

    @property
    def largest(self) -> float:
        """The greatest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def is_constant(self) -> bool:
        """Whether all elements are one known number."""
        return self.low == self.high

    @property
    def is_random(self) -> bool:
        """Whether its elements are made of random bits: their rounding is no error."""
        return self.rounded is not None and primitive(self.rounded.site.name).bits

    def fits(self, dtype: Any) -> bool:
        """Whether a half dtype holds its elements exactly, or all of them are one constant of the program."""
        return self.is_constant or (self.whole and self.largest <= exact_up_to(dtype))


def exact_up_to(dtype: Any) -> int:
    """The largest n such that a dtype represents all integers up to n."""
    return 2 ** (int(compat.finfo(dtype).nmant) + 1)


class Amplified(NamedTuple):
    """A rounding that is amplified.

    Args:
        site: The operation that amplifies it.
        rounding: The rounding.
        dtype: The half dtype.
        why: Where, or by what, it is amplified.
    """

    site: Site
    rounding: Rounding
    dtype: str
    why: str

    @property
    def text(self) -> str:
        """The finding in words, with the line that rounds."""
        what = f"whole numbers beyond {exact_up_to(self.dtype)}" if self.rounding.of_whole else "a value"
        return f"{what}, rounded to {self.dtype} by {self.rounding.site.label}: {self.why}"


def amplified(flow: Flow) -> tuple[list[Amplified], Callable[[Value], Facts]]:
    """The amplified roundings of a program's forward pass, one for each line that amplifies and line that rounds.

    Also returns a function that tells what is known of a value.
    """
    found = _Roundings()
    found.run(flow, [found.of(v) for v in flow.inputs])
    return list(found.amplified.values()), found.of


_LARGEST = 2**22  # Closed-over weights are too large to scan, and their bounds are of no use.


def of_constant(array: Any) -> Facts:
    """What is known of a constant."""
    if array is None or isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return Facts()
    dtype = jnp.result_type(array)
    is_number = any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
    if not is_number or not 0 < np.size(array) <= _LARGEST:
        return Facts()
    values = np.asarray(array)
    low, high = float(values.min()), float(values.max())
    if math.isnan(low):
        return Facts()
    whole = dtype.kind in "biu" or bool(np.all(values == np.floor(values)))
    return Facts(low=low, high=high, whole=whole, written=True)


_SMALL_INTEGERS = {np.dtype(name) for name in ("int8", "uint8", "int16", "uint16")}


def ends_of(dtype: Any) -> tuple[float, float]:
    """The least and the greatest number of a small integer dtype; infinite for others."""
    limits = np.iinfo(dtype) if dtype in _SMALL_INTEGERS else None
    return (-math.inf, math.inf) if limits is None else (float(limits.min), float(limits.max))


class _Roundings:
    """Evaluates a program with `Facts` in place of values."""

    def __init__(self) -> None:
        self.amplified: dict[Any, Amplified] = {}
        self.facts: dict[Value, Facts] = {}

    def of(self, value: Value) -> Facts:
        """What is known of a value."""
        if value.kind == CONSTANT:
            return of_constant(value.constant)
        if value.whole is not None:
            return self.of(value.whole)
        if value in self.facts or not compat.is_shaped(value.aval):
            return self.facts.get(value, Facts())
        if value.aval.dtype == np.bool_:
            return Facts(low=0, high=1, whole=True, written=True)
        is_whole = value.kind == INPUT and jnp.issubdtype(value.aval.dtype, jnp.integer)
        low, high = ends_of(value.aval.dtype) if is_whole else (-math.inf, math.inf)
        return Facts(low=low, high=high, whole=is_whole)

    def run(self, flow: Flow, given: Sequence[Facts]) -> list[Facts]:
        """The facts of a program's results, given those of its inputs."""
        self.facts.update(zip(flow.inputs, given, strict=True))
        for node in flow.nodes:
            self.facts.update(zip(node.writes, self._rule(node), strict=True))
        return [*map(self.of, flow.outputs)]

    def _rule(self, node: Node) -> Sequence[Facts]:
        place, given = node.site, [*map(self.of, node.reads)]
        if node.inner and is_entered(place.eqn):
            return node.results(given, self.run, Facts.joined)
        for inner in node.inner:
            self.run(inner, [Facts()] * len(inner.inputs))
        if place.phase == FORWARD:
            self._read(place, given)
        found = _result(place, given)
        return [found if is_float(v) else found._replace(rounded=None, matmul=None) for v in place.outvars]

    def _read(self, place: Site, given: Sequence[Facts]) -> None:
        """Notes what an equation amplifies of its operands."""
        row = primitive(place.name)
        has_pole_at_zero = row.worst.startswith("near") or row.risk == "pow" or place.name == "sqrt"
        is_choice = place.name in ("argmin", "argmax", "top_k")
        is_comparison = place.name in ("eq", "ne") and place.invars[0] is not place.invars[1]
        for i, facts in enumerate(given):
            if facts.is_random:
                continue
            inexact, is_divisor = facts.rounded or facts.matmul, row.amplifies == "second" and i == 1
            if inexact and (row.decomposes or row.solve):
                self._note(place, inexact, "the condition number multiplies the error")
            # Integers of fewer bits are no indices, but values that are quantised.
            elif inexact and makes_integers(place) and place.outvars[0].aval.dtype.itemsize >= 4:
                self._note(place, inexact, "one unit apart is another integer")
            elif facts.rounded and facts.rounded.of_whole and is_comparison:
                self._note(place, facts.rounded, "distinct ones become equal")
            elif (by := facts.difference) and (has_pole_at_zero or is_divisor or (is_choice and by.of_size)):
                self._note(place, facts.difference, f"near-equal numbers cancel, and {place.name} reads the difference")
            elif facts.rounded and row.worst and not _is_harmless(place, facts):
                self._note(place, facts.rounded, f"{place.name} amplifies it {row.worst.replace('_', ' ')}")

    def _note(self, place: Site, rounding: Rounding, why: str) -> None:
        key = place.path, place.source, rounding.site.source
        half = next(v.aval.dtype.name for v in (*rounding.site.outvars, *rounding.site.invars) if is_half(v))
        self.amplified.setdefault(key, Amplified(place, rounding, half, why))


_PERIODS = 8.0  # radians up to which the rounding of an angle is no larger than that of any other value


def _is_harmless(place: Site, facts: Facts) -> bool:
    """Whether the operand is known to stay away from where an operation amplifies."""
    match place.name:
        case "sin" | "cos" | "tan":
            return facts.largest <= _PERIODS
        case "log1p":
            return facts.low >= 0
        case "log" | "log2":
            return facts.summed
        case "rsqrt":  # Its relative error is half of its operand's, unless that is small: a variance, stored in half.
            stored = facts.rounded is not None and facts.rounded.site.name in ("convert_element_type", "reduce_sum")
            return not stored or is_half(place.invars[0])
    return False


def makes_integers(place: Site) -> bool:
    """Whether it converts floats to integers: indices, counts, quantised values."""
    is_cast = place.name == "convert_element_type" and is_float(place.invars[0])
    return is_cast and jnp.issubdtype(place.outvars[0].aval.dtype, jnp.integer)


def _result(place: Site, given: Sequence[Facts]) -> Facts:
    """The facts of an equation's result."""
    row, eqn, name = primitive(place.name), place.eqn, place.name
    out = eqn.outvars[0] if eqn.outvars else None
    if out is None or not compat.is_shaped(out.aval) or not isinstance(out.aval.dtype, np.dtype):  # of a random key
        return Facts()
    (low, high), (written, positions) = _bounds(place, given), _written(place, given)
    found = Facts(low=low, high=high, whole=_is_whole(place, given), written=written, ids=positions)
    if row.op in (Op.READ, Op.OPAQUE):
        return found
    if name in MATMULS and not is_product(eqn):
        halves = [facts.fits(v.aval.dtype) for facts, v in zip(given, place.invars, strict=True) if is_half(v)]
        ids = next((f.rounded for f in given if f.rounded and f.rounded.of_whole), None)
        found = found._replace(rounded=ids, matmul=None if all(halves) else Rounding(place))
    elif row.is_affine or row.exact or name in MATMULS:
        found = found._replace(matmul=next((facts.matmul for facts in given if facts.matmul), None))
    if _keeps_rounding(place):
        operands = given[:1] if row.linear == "first" else given
        found = found._replace(rounded=next((f.rounded for f in operands if f.rounded and not f.is_random), None))
    sources = [facts for facts in given if not facts.is_constant]
    if sources and all(facts.is_random for facts in sources):
        found = found._replace(rounded=sources[0].rounded)
    moved = (row.keeps_values or row.exact) and (name != "convert_element_type" or is_half(place.invars[0]))
    # A constant, or whole numbers that the dtype holds, are not rounded.
    is_number = all(facts.is_constant for facts in given) and (found.is_constant or name not in SUMS)
    is_exact = is_number or (is_half(out) and found.fits(out.aval.dtype))
    if is_half(out) and not found.rounded and not moved and not is_exact:
        found = found._replace(rounded=Rounding(place, found.whole))
    summed = name == "reduce_sum" or (row.keeps_values and not row.kernel and all(facts.summed for facts in given[:1]))
    return found._replace(difference=_difference(place, given, found), summed=summed)


def _keeps_rounding(place: Site) -> bool:
    """Whether the rounding of operands reaches the result element by element."""
    row = primitive(place.name)
    if row.kernel:
        return is_product(place.eqn) or row.keeps_values or drops_axes(place.eqn)
    return row.is_affine or row.exact or place.name in ("square", "integer_pow")


def _difference(place: Site, given: Sequence[Facts], found: Facts) -> Rounding | None:
    """The difference of near-equal rounded numbers that a result is, up to scaling; None if it is none."""
    row = primitive(place.name)
    kept = next((facts.difference for facts in given if facts.difference), None)
    if kept is not None:
        stays = row.is_affine or row.exact or place.name == "sqrt"  # near zero
        return kept if stays and not row.kernel and row.linear != "first" else None
    if not row.adds or len(given) != 2 or not found.low <= 0 <= found.high:
        return None
    rounding = next((facts.rounded for facts in given if facts.rounded), None)
    if rounding is None or place.phase != FORWARD:
        return None
    (first, second), (a, b) = given, place.invars
    if first.is_constant or second.is_constant:
        constant, other = (first, second) if first.is_constant else (second, first)
        from_constant = first.is_constant and place.name == "sub"
        return rounding if constant.low and (from_constant or math.isfinite(other.largest)) else None
    alike = a.aval.shape == b.aval.shape != ()
    return rounding._replace(of_size=first.low >= 0) if alike and place.name == "sub" else None


def _is_whole(place: Site, given: Sequence[Facts]) -> bool:
    out, row, name = place.outvars[0].aval, primitive(place.name), place.name
    if out.dtype.kind in "biu" or name in ("iota", "floor", "ceil", "round"):
        return True
    keeps = row.keeps_integers or name in MATMULS or name in ("square", "integer_pow")
    return bool(given) and keeps and all(facts.whole for facts in given)


def _written(place: Site, given: Sequence[Facts]) -> tuple[bool, bool]:
    """Whether a result follows from constants and positions alone, by operations whose bounds are exact; and from
    positions.
    """
    row, is_position = primitive(place.name), place.name == "iota"
    sources = [given[i] for i in row.sources(len(given))] if row.keeps_values else given
    exact = row.keeps_values or (place.name in _ARITHMETIC and all(math.isfinite(facts.largest) for facts in given))
    is_written = is_position or (exact and all(facts.written for facts in sources))
    return is_written or place.outvars[0].aval.dtype == bool, is_position or any(facts.ids for facts in sources)


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
    "square": lambda a: a * a,
}


def _bounds(place: Site, given: Sequence[Facts]) -> tuple[float, float]:
    """Bounds of a result: interval arithmetic, and the ranges of functions."""
    row, name, params = primitive(place.name), place.name, place.eqn.params
    out = place.outvars[0].aval
    if out.dtype == bool:
        return 0.0, 1.0
    if name == "iota":
        return 0.0, params["shape"][params["dimension"]] - 1.0
    if row.bounded:
        return row.bounds
    if name == "div" and (out.dtype.kind in "iu" or given[1].low <= 0 <= given[1].high):
        return (0.0 if given[0].low >= 0 and given[1].low >= 0 else -math.inf), math.inf
    corners = itertools.product(*((facts.low, facts.high) for facts in given))
    is_power = name == "integer_pow" and params["y"] > 0
    if is_power or name in _ARITHMETIC or (name == "pow" and given[0].low >= 0 and given[1].low >= 0):
        exponent = [params["y"]] if is_power else []
        found = [_ARITHMETIC.get(name, _power)(*corner, *exponent) for corner in corners]
        is_even = name == "square" or (is_power and params["y"] % 2 == 0)
        return _no_nan([*found, 0.0] if is_even and given[0].low < 0 < given[0].high else found)
    if name in SUMS:
        counts = (1, terms_of(place)) if name == "cumsum" else (terms_of(place),)
        found = [terms * math.prod(corner) for corner in corners for terms in counts]
        return _no_nan([*found, 0.0] if name == "dot_general" else found)
    if row.keeps_values:
        sources = [given[i] for i in row.sources(len(given)) if i < len(given)]
        low, high = ends_of(out.dtype)
        return max(min(f.low for f in sources), low), min(max(f.high for f in sources), high)
    return -math.inf, math.inf


def _power(a: float, b: float) -> float:
    with np.errstate(over="ignore"):  # where Python raises
        return float(np.float64(a) ** b)


SUMS = ("reduce_sum", "cumsum", "dot_general")


def terms_of(place: Site) -> int:
    """The number of terms of each sum."""
    shape = place.invars[0].aval.shape
    if place.name == "cumsum":
        return int(shape[place.eqn.params["axis"]])
    axes = place.eqn.params["axes"] if place.name == "reduce_sum" else place.eqn.params["dimension_numbers"][0][0]
    return math.prod(shape[d] for d in axes)


def _no_nan(found: Sequence[float]) -> tuple[float, float]:
    """The least and the greatest of the corners of an interval; 0 × inf is unknown."""
    return (-math.inf, math.inf) if any(map(math.isnan, found)) else (min(found), max(found))
