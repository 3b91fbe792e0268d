"""The values of a gradient program whose ranges count, and statistics of them.

Only some intermediates count: operands and results of matmuls and convolutions (read and written by Tensor Cores), and
module outputs (values read by an equation outside the module's named scope). Casts, transposes and similar operations
only pass a value on. The equation that computed the value represents it.

The statistics are small arrays per equation, summed over iterations and batches, by XLA or by NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.inspection.reports import merged
from mpjax.program import compat
from mpjax.program.dtypes import is_float, is_half, is_low
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import Block, Site
from mpjax.program.host import in_host_memory
from mpjax.program.interpreter import Arrays, Key, Notes, Probe
from mpjax.program.primitives import MATMULS, Op, primitive
from mpjax.program.source import BACKWARD, FORWARD, RECOMPUTED

# By name: mpjax's own primitives of scaled formats, and JAX's sum of gradients.

COPIES = PACKED, _ = "packed_elements", "float8_quantise"  # primitives that make copies in eight bits
_NOTHING: frozenset[int] = frozenset()


class _Producers(NamedTuple):
    """The equations that produced a value. `near` sees through moves and casts, `far` through scalings and sums too."""

    near: frozenset[int] = _NOTHING
    far: frozenset[int] = _NOTHING

    def or_(self, other: _Producers) -> _Producers:
        return _Producers(self.near | other.near, self.far | other.far)


@dataclasses.dataclass(frozen=True)
class Counted:
    """The numbers of the equations whose results count.

    Args:
        activations: Equations of the forward pass.
        gradients: Equations of the backward pass that compute gradients of activations.
        parameters: Equations of the backward pass, matmuls and sums, that compute gradients of parameters.
        half: The half dtype in which the program stores an equation's results, or in which an operation reads them, by
            its number; empty for a program without half.
        loss: Equations that compute the other results: the loss.
    """

    activations: frozenset[int]
    gradients: frozenset[int]
    parameters: frozenset[int]
    half: Mapping[int, np.dtype]
    loss: frozenset[int]

    @functools.cached_property
    def all(self) -> frozenset[int]:
        """Activations and gradients of both kinds."""
        return self.activations | self.gradients | self.parameters

    def matters(self, number: int) -> bool:
        """Whether half's limits apply to an equation's result; in a program without half they apply to every result."""
        return not self.half or number in self.half


def counted(block: Block, num_gradients: int) -> Counted:
    """The equations that count in a program whose first outputs are gradients of parameters."""
    analysis = _Analysis(block, num_gradients)
    parameters = analysis.parameters
    phases = {number: analysis.places[number].phase for number in analysis.found}
    forward, backward = (frozenset(n for n in phases if phases[n] == phase) for phase in (FORWARD, BACKWARD))
    return Counted(forward, backward - parameters, backward & parameters, analysis.half, analysis.loss)


def in_units_of_scales(eqn: Any) -> bool:
    """Whether an equation's result is a copy in eight bits, its scale, or a matmul of copies without their scales."""
    if eqn.primitive.name in MATMULS:
        return any(is_low(v) and not is_half(v) for v in eqn.invars)
    return eqn.primitive.name in ("float8_scale", *COPIES)


def stores_eight_bits(place: Site) -> bool:
    """Whether an equation makes a copy in eight bits, once."""
    return place.name in COPIES and place.phase != RECOMPUTED


def is_measured(place: Site, counts: Counted) -> bool:
    """Whether an equation's results are measured: all results that count, and all other floating-point arithmetic."""
    eqn, name = place.eqn, place.name
    if place.blocks or place.phase == RECOMPUTED or not floats(eqn.outvars) or in_units_of_scales(eqn):
        return False
    if place.number in counts.all:
        return True
    row = primitive(name)
    # Operations that keep values, or round them to integers, lose nothing more in half.
    loses = not (row.keeps_values or row.exact or row.moves or row.op is Op.READ)
    return loses and bool(floats(eqn.invars))


def floats(variables: Iterable[Any]) -> list[int]:
    """The indices of the variables that are real floating-point arrays."""
    return [i for i, v in enumerate(variables) if is_float(v)]


def equations_of_gradients(block: Block, num_gradients: int) -> frozenset[int]:
    """The equations that compute the gradients of parameters, looking through moves, casts, scalings and sums."""
    return _Analysis(block, num_gradients).parameters


class _Analysis:
    """Evaluates a program with `_Producers` in place of values, and finds the equations whose results count."""

    def __init__(self, block: Block, num_gradients: int):
        self.places = {place.number: place for place in block.places()}
        self.found, self.half = set[int](), dict[int, np.dtype]()
        outs = self.block(block, [_Producers()] * len(block.jaxpr.invars))
        self.parameters = frozenset[int]().union(*(producers.far for producers in outs[:num_gradients]))
        self.loss = frozenset[int]().union(*(producers.near for producers in outs[num_gradients:]))

    def block(self, block: Block, ins: Sequence[_Producers]) -> list[_Producers]:
        env = block.environment(ins, [_Producers()] * len(block.jaxpr.constvars))
        return evaluate(block, env, self._rule, lambda literal, place: _Producers())

    def _rule(self, place: Site, given: Sequence[_Producers]) -> list[_Producers]:
        return place.results(given, self.block, _Producers.or_) if place.blocks else self._computed(place, given)

    def _computed(self, place: Site, given: Sequence[_Producers]) -> list[_Producers]:
        eqn, name = place.eqn, place.name
        near, far = functools.reduce(_Producers.or_, given, _Producers())
        if name in (*COPIES, "restored"):  # A copy stands for its array.
            return [given[0]]
        if primitive(name).moves or primitive(name).whole:
            self._note_half(place, near)
            return [given[min(i, len(given) - 1)] if given else _Producers() for i in range(len(eqn.outvars))]
        if name in MATMULS or primitive(name).contracts:
            self.found |= near
        if (name in (*MATMULS, "float8_rescale") or primitive(name).contracts) and not in_units_of_scales(eqn):
            self.found.add(place.number)
        self._mark_module_outputs(place, near)
        own = frozenset({place.number})
        self._note_half(place, own)
        sees_through = name == "add_any" or (primitive(name).scales and any(not v.aval.shape for v in eqn.invars))
        return [_Producers(own, own | far if sees_through else own)] * len(eqn.outvars)

    def _note_half(self, place: Site, numbers: Iterable[int]) -> None:
        """Notes that the values of some equations are stored in half, if an equation has half results."""
        half = next((v.aval.dtype for v in place.eqn.outvars if is_half(v)), None)
        if half is not None:
            self.half |= dict.fromkeys(numbers, half)

    def _mark_module_outputs(self, reader: Site, numbers: Iterable[int]) -> None:
        """Marks the operands that leave their module: the reader lies outside of it."""
        for number in numbers:
            path = self.places[number].path
            if path and reader.path != path and not reader.path.startswith(path + "/"):
                self.found.add(number)


BINS = 256  # float32's exponents
BIAS = 127
# As integers, the bits of float32 magnitudes sort like the magnitudes; infinity and NaN are the largest.
SIZE_BITS, INFINITY = 0x7FFFFFFF, 0x7F800000


RangeNote = tuple[Any, Any, Any]  # counts, extremes and exponents of some arrays


@dataclasses.dataclass(frozen=True)
class Limits:
    """The exact limits of a half dtype, with rounding to nearest, ties to even.

    Args:
        dtype: The half dtype.
        flushed: Magnitudes up to this one become zero.
        overflowed: Magnitudes from this one on become inf.
    """

    dtype: np.dtype
    flushed: float
    overflowed: float

    @classmethod
    def of(cls, dtype: Any) -> Limits:
        """The limits of a dtype."""
        info = compat.finfo(dtype)
        largest = float(info.max)
        last_place = 2.0 ** (np.floor(np.log2(largest)) - info.nmant)
        return cls(np.dtype(dtype), float(info.smallest_subnormal) / 2, largest + last_place / 2)

    @staticmethod
    def bits_of(limit: float) -> int:
        """The bits of a limit as a float32."""
        with np.errstate(over="ignore"):  # beyond float32's range: infinity
            return int(np.float32(limit).view(np.int32))

    def flushed_share(self, exponents: Mapping[int, int], factor: float) -> float:
        """The share of values that become zero when a power of two multiplies them.

        Args:
            exponents: The number of values per exponent of two.
            factor: The power of two.
        """
        # Numbers with a smaller exponent become zero. With this exponent, only the power of two itself does.
        lowest = round(np.log2(self.flushed)) - round(math.log2(factor))
        lost = sum(count for exponent, count in exponents.items() if exponent < lowest)
        return lost / max(sum(exponents.values()), 1)

    @property
    def exponents(self) -> tuple[int, int]:
        """The smallest and the largest exponent of two that the dtype holds, subnormal numbers included."""
        return round(np.log2(self.flushed)) + 1, round(np.log2(self.overflowed)) - 1


@dataclasses.dataclass
class Tally:
    """Statistics of values; `+` combines two tallies.

    Args:
        max: The largest magnitude of a finite value.
        min_nonzero: The smallest nonzero magnitude; inf if there is none.
        size: The number of values.
        zeros: The number of zeros.
        flushed: The number of nonzero values that half would flush to zero.
        overflowed: The number of finite values that overflow to inf in half.
        nonfinite: The number of values that are inf or NaN already.
        dtypes: The dtypes in which the program computes the values.
        exponents: The number of nonzero finite values per exponent, shape (BINS,); 0 if they were not counted.
    """

    max: float = 0.0
    min_nonzero: float = np.inf
    size: int = 0
    zeros: int = 0
    flushed: int = 0
    overflowed: int = 0
    nonfinite: int = 0
    dtypes: tuple[str, ...] = ()
    exponents: Any = dataclasses.field(default=0, compare=False)

    def __add__(self, other: Tally) -> Tally:
        mine, theirs = vars(self), vars(other)
        extremes = {"max": max(self.max, other.max), "min_nonzero": min(self.min_nonzero, other.min_nonzero)}
        dtypes = tuple(dict.fromkeys((*self.dtypes, *other.dtypes)))
        return Tally(**{name: mine[name] + theirs[name] for name in mine} | extremes | {"dtypes": dtypes})

    @property
    def flushed_share(self) -> float:
        """The share of the nonzero values that half would flush to zero."""
        return self.flushed / max(self.size - self.zeros - self.nonfinite, 1)

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of zeros, of the nonzero values that half would flush, and of the finite ones that overflow."""
        return self.zeros / max(self.size, 1), self.flushed_share, self.overflowed / max(self.size - self.nonfinite, 1)


def _classified(size: Any, limits: Limits) -> Sequence[Any]:
    """Counts of zero, flushed or zero, in-range and finite elements, and the bits of the extreme nonzero magnitudes.

    One reduction with six results reads the array once and compiles to one kernel. It takes a thirtieth of the time of
    six reductions.

    Args:
        size: The bits of the float32 magnitudes of an array's elements.
        limits: The limits of the half dtype.
    """
    flushed, overflowed = limits.bits_of(limits.flushed), limits.bits_of(limits.overflowed)
    masks = (size == 0, size <= flushed, size < overflowed, size < INFINITY)
    operands = (
        *(mask.astype(jnp.uint32) for mask in masks),
        jnp.where(size < INFINITY, size, 0),
        jnp.where(size == 0, INFINITY, jnp.minimum(size, INFINITY)),
    )
    starts = (*[np.uint32(0)] * 4, np.int32(0), np.int32(INFINITY))

    def combine(a: Sequence[Any], b: Sequence[Any]) -> Sequence[Any]:
        return (*(x + y for x, y in zip(a[:4], b[:4], strict=True)), lax.max(a[4], b[4]), lax.min(a[5], b[5]))

    return lax.reduce(operands, starts, combine, tuple(range(size.ndim)))


def tally_of(found: RangeNote, *dtypes: str) -> Tally:
    """The tally of a note of values of some dtypes."""
    counts, (largest, smallest), exponents = found
    histogram = exponents.astype(int) if exponents.size else 0
    size, zeros, flushed, overflowed, nonfinite = map(int, counts)
    return Tally(float(largest), float(smallest), size, zeros, flushed, overflowed, nonfinite, dtypes, histogram)


# What eight bits do to the operands of float8 matmuls, and to arrays that are kept for the backward pass

# float32[6]: the largest magnitude, and over the median, at worst; the numbers of all values, of those that are nonzero
# and finite, of these that become zero, and of those that are not finite.
EightBitNote = Any


@dataclasses.dataclass(frozen=True)
class EightBitRange:
    """The arrays of one module in one pass that are stored in eight bits, over all batches.

    Args:
        name: The module path.
        phase: `"forward"` or `"backward"`.
        dtypes: The dtype. In float8, e4m3 holds operands and what is kept, e5m2 cotangents.
        max: The largest magnitude.
        flushed: The share of the nonzero values that become zero, because the largest value of their tensor, or of
            their block, is much larger.
        outliers: The largest magnitude over the median of the nonzero magnitudes; the largest of all tensors or blocks.
        count: The number of nonzero values.
    """

    name: str
    phase: str
    dtypes: tuple[str, ...]
    max: float
    flushed: float
    outliers: float
    count: int

    @classmethod
    def of(cls, place: Site, found: EightBitNote) -> EightBitRange:
        """The row of a note."""
        largest, outliers, _, count, flushed, _ = map(float, found)
        dtype = place.outvars[0].aval.dtype.name
        return cls(place.path, place.phase, (dtype,), largest, flushed / max(count, 1.0), outliers, int(count))


together_in_eight_bits = functools.partial(merged, largest="max outliers", total="count", shares="flushed")


def merged_in_eight_bits(a: EightBitNote, b: EightBitNote) -> EightBitNote:
    """The note of both arrays."""
    return jnp.concatenate([jnp.maximum(a[:2], b[:2]), a[2:] + b[2:]])


def _eight_bit_note(eqn: Any, x: Any, scales: Any, elements: Any) -> EightBitNote:
    if eqn.primitive.name == PACKED:
        return _in_eight_bits(x, elements, 0.0, x.shape[-1] // scales.shape[-1])
    limit = float(compat.finfo(eqn.params["dtype"]).smallest_subnormal) / 2
    return _in_eight_bits(x, elements, limit, max(x.size, 1))


@functools.partial(jax.jit, static_argnames=("limit", "block"))
def _in_eight_bits(x: Any, elements: Any, limit: float, block: int) -> EightBitNote:
    """The note of an array and its copy, of which elements up to a limit are zero, and blocks have one scale."""
    size, element = (jnp.abs(compat.replicated(y).astype(jnp.float32)).reshape(-1, block) for y in (x, elements))
    finite = jnp.isfinite(size)
    nonzero = (size > 0) & finite
    largest = jnp.max(size, axis=1, initial=0, where=nonzero)
    median = jnp.nanmedian(jnp.where(nonzero, size, jnp.nan), axis=1)
    worst = [jnp.max(y, initial=0, where=largest > 0) for y in (largest, largest / median)]
    counts = [jnp.sum(mask, dtype=jnp.float32) for mask in (nonzero, nonzero & (element <= limit), ~finite)]
    return jnp.stack([*worst, jnp.float32(size.size), *counts])


class RangeProbe(Probe):
    """Records range statistics of the results of some equations.

    Args:
        places: The equations.
        limits: The limits of the dtype that each is compared with, by its number.
        graded: The numbers of those whose exponents are counted.
        quantised: Copies in eight bits to record as well.
    """

    def __init__(
        self,
        places: Iterable[Site],
        limits: Callable[[int], Limits],
        graded: Collection[int] = (),
        quantised: Iterable[Site] = (),
    ):
        self.places: Mapping[int, Site] = {p.number: p for p in places}
        self.quantised: Mapping[int, Site] = {p.number: p for p in quantised}
        self.limits, self.graded = limits, graded
        self.noted = [*(("range", n) for n in self.places), *(("eight bits", n) for n in self.quantised)]

    def equation(self, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays, rerun: Callable[..., Any]) -> Notes:
        number = place.number
        if number in self.quantised:
            return {("eight bits", number): _eight_bit_note(place.eqn, *ins, *outs)}
        if number not in self.places:
            return {}
        measured = [outs[i] for i in floats(place.eqn.outvars)]
        return {("range", number): note(measured, self.limits(number), number in self.graded)}

    def empty(self, key: Key) -> RangeNote | EightBitNote:
        if key[0] == "eight bits":
            return jnp.zeros(6, jnp.float32)
        exponents = jnp.zeros(BINS if key[1] in self.graded else 0, jnp.uint32)
        return jnp.zeros(5, jnp.uint32), jnp.array([0.0, np.inf], jnp.float32), exponents

    def merge(self, key: Key, a: Any, b: Any) -> RangeNote | EightBitNote:
        if key[0] == "eight bits":
            return merged_in_eight_bits(a, b)
        (counts, (largest, smallest), exponents), (more, (larger, smaller), others) = a, b
        extremes = jnp.stack([jnp.maximum(largest, larger), jnp.minimum(smallest, smaller)])
        return counts + more, extremes, exponents + others


def note(arrays: Sequence[Any], limits: Limits, graded: bool = True) -> RangeNote:
    """The note of some arrays, computed with NumPy where the host can read them in place.

    Args:
        arrays: Real floating-point arrays.
        limits: The limits of the half dtype.
        graded: Whether to compute the histogram of exponents.

    Returns:
        Counts (in the order of the last fields of `Tally`), the largest and the smallest nonzero magnitude, and the
        histogram.
    """
    return (note_on_host if all(map(in_host_memory, arrays)) else note_on_device)(arrays, limits, graded)


@functools.partial(jax.jit, static_argnames=("limits", "graded"))
def note_on_device(arrays: Sequence[Any], limits: Limits, graded: bool = True) -> RangeNote:
    """The same, compiled once per combination of shapes."""
    arrays = [*map(compat.replicated, arrays)]
    x = arrays[0] if len(arrays) == 1 else jnp.concatenate([out.ravel() for out in arrays])
    bits, size = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & SIZE_BITS, np.uint32(np.size(x))
    zeros, small, held, finite, largest, smallest = _classified(bits, limits)
    counts = [size, zeros, small - zeros, finite - held, size - finite]
    extremes = lax.bitcast_convert_type(jnp.stack([largest, smallest]), jnp.float32)
    exponents = jnp.zeros(BINS if graded else 0, jnp.uint32)
    if graded:
        ordinary = ((bits != 0) & (bits < INFINITY)).astype(jnp.uint32)
        exponents = exponents.at[bits.ravel() >> 23].add(ordinary.ravel())
    return jnp.stack([jnp.asarray(count, jnp.uint32) for count in counts]), extremes, exponents


_CHUNK = 1 << 16  # elements: intermediate results stay in the cache


def note_on_host(arrays: Sequence[Any], limits: Limits, graded: bool = True) -> RangeNote:
    """The same, computed with NumPy."""
    counts, histogram = np.zeros(5, np.uint32), np.zeros(BINS, np.uint32)
    largest, smallest = 0, INFINITY
    for size in (size for x in arrays for size in _chunks(x)):
        flushed, overflowed = size <= limits.bits_of(limits.flushed), size < limits.bits_of(limits.overflowed)
        zeros, small, held, finite = map(np.count_nonzero, (size == 0, flushed, overflowed, size < INFINITY))
        counts += np.array([size.size, zeros, small - zeros, finite - held, size.size - finite], np.uint32)
        if graded:
            histogram += np.bincount(size >> 23, minlength=BINS).astype(np.uint32)
            histogram[[0, BINS - 1]] -= np.array([zeros, size.size - finite], np.uint32)
        if finite < size.size:
            size = size[size < INFINITY]
        if zeros < size.size:
            largest = max(largest, int(size.max()))
            smallest = min(smallest, int((size - np.uint32(1)).min()) + 1)  # zero becomes the largest integer
    extremes = np.array([largest, smallest], np.uint32).view(np.float32)
    return counts, extremes, histogram if graded else histogram[:0]


def _chunks(x: Any) -> Iterator[np.ndarray]:
    """The bits of the magnitudes of an array's elements as float32, in parts."""
    bits = np.ascontiguousarray(np.asarray(x), np.float32).reshape(-1).view(np.uint32)
    for i in range(0, bits.size, _CHUNK):
        yield bits[i : i + _CHUNK] & np.uint32(SIZE_BITS)
