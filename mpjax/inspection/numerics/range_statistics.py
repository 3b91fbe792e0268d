"""Ranges of values, measured inside a compiled program: small arrays by equation, added up over turns and batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._jaxpr import compat
from mpjax._jaxpr.interpreter import Block, Key, Place, Probe, is_inexact
from mpjax._jaxpr.primitives import Op, primitive
from mpjax._jaxpr.source import RECOMPUTED
from mpjax.inspection.numerics.activations import Counted

BINS = 256  # float32's exponents
BIAS = 127


@dataclasses.dataclass(frozen=True)
class Limits:
    """Where a half dtype ends, exactly: rounding is to nearest, ties to even.

    Args:
        dtype: the half dtype.
        flushed: sizes up to this one become zero.
        overflowed: sizes from this one on become inf.
        bits: of the mantissa, without the leading one.
    """

    dtype: np.dtype
    flushed: float
    overflowed: float
    bits: int

    @classmethod
    def of(cls, dtype: Any) -> Limits:
        """The limits of a dtype."""
        info = compat.finfo(dtype)
        largest = float(info.max)
        last_place = 2.0 ** (np.floor(np.log2(largest)) - info.nmant)
        return cls(np.dtype(dtype), float(info.smallest_subnormal) / 2, largest + last_place / 2, int(info.nmant))

    @property
    def exponents(self) -> tuple[int, int]:
        """The smallest and the largest exponent of two that the dtype holds, subnormal numbers included."""
        return round(np.log2(self.flushed)) + 1, round(np.log2(self.overflowed)) - 1


@dataclasses.dataclass
class Tally:
    """What was seen of values; `+` adds two up.

    Args:
        size: how many values.
        zeros: how many of them are zero.
        flushed: how many nonzero ones half would flush to zero.
        overflowed: how many finite ones half would make inf.
        nonfinite: how many are inf or NaN already.
        addends: how many nonzero numbers were added to others.
        absorbed: how many of them are too small, against the sum, to change it in half.
        max: the largest size of a finite value.
        min_nonzero: the smallest size of a nonzero one; inf if there is none.
    """

    size: int = 0
    zeros: int = 0
    flushed: int = 0
    overflowed: int = 0
    nonfinite: int = 0
    addends: int = 0
    absorbed: int = 0
    max: float = 0.0
    min_nonzero: float = np.inf

    def __add__(self, other: Tally) -> Tally:
        mine, theirs = vars(self), vars(other)
        extremes = {"max": max(self.max, other.max), "min_nonzero": min(self.min_nonzero, other.min_nonzero)}
        return Tally(**{name: mine[name] + theirs[name] for name in mine} | extremes)

    @property
    def flushed_share(self) -> float:
        """The share of the nonzero values that half would flush to zero."""
        return self.flushed / max(self.size - self.zeros - self.nonfinite, 1)

    @property
    def overflowed_share(self) -> float:
        """The share of all finite values that half would make inf."""
        return self.overflowed / max(self.size - self.nonfinite, 1)

    @property
    def absorbed_share(self) -> float:
        """The share of nonzero addends that would change nothing in half."""
        return self.absorbed / max(self.addends, 1)


def tally_note(x: Any, limits: Limits, pairs: Sequence[tuple[Any, Any]] = ()) -> tuple[Any, Any]:
    """The counts and the extremes of an array, as two small arrays; `pairs` are addends with their sums."""
    x = jnp.abs(x.astype(jnp.float32))
    finite = jnp.isfinite(x)
    nonzero = finite & (x != 0)
    absorbed = [(a != 0) & jnp.isfinite(a) & (jnp.abs(a) <= _half_place(total, limits)) for a, total in pairs]
    # One reduction for all counts, of a broadcast that is never stored: one for each takes longer to compile.
    below = np.nextafter(np.float32(limits.overflowed), np.float32(0))
    steps = jnp.array([0.0, limits.flushed, below, np.finfo(np.float32).max], jnp.float32)
    zeros, small, held, finites = jnp.sum(
        x[None] <= steps.reshape(-1, *[1] * x.ndim), axis=tuple(range(1, x.ndim + 1)), dtype=jnp.uint32
    )
    size = jnp.uint32(x.size)
    counts = [size, zeros, small - zeros, finites - held, size - finites]
    counts += [sum((_count((a != 0) & jnp.isfinite(a)) for a, _ in pairs), start=jnp.uint32(0))]
    counts += [sum(map(_count, absorbed), start=jnp.uint32(0))]
    largest = jnp.max(x, where=finite, initial=0.0)
    smallest = jnp.min(x, where=nonzero, initial=jnp.inf)
    return jnp.stack(counts), jnp.stack([largest, smallest])


def tally_of(note: tuple[Any, Any]) -> Tally:
    """What a note says."""
    counts, (largest, smallest) = note
    size, zeros, flushed, overflowed, nonfinite, addends, absorbed = map(int, counts)
    return Tally(size, zeros, flushed, overflowed, nonfinite, addends, absorbed, float(largest), float(smallest))


def exponents(x: Any) -> Any:
    """The histogram of the exponents of nonzero finite values."""
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.uint32).ravel()
    exponent = (bits >> 23).astype(jnp.int32)
    counts = (bits != 0) & (exponent < BINS - 1)
    return jnp.zeros(BINS, jnp.uint32).at[exponent].add(counts.astype(jnp.uint32))


def _count(mask: Any) -> Any:
    return jnp.sum(mask, dtype=jnp.uint32)


def _half_place(total: Any, limits: Limits) -> Any:
    """Half a unit in half's last place of each number: what is no larger does not change it (ties to even)."""
    bits = lax.bitcast_convert_type(jnp.abs(total.astype(jnp.float32)), jnp.uint32)
    power = lax.bitcast_convert_type(bits & jnp.uint32(0x7F800000), jnp.float32)
    return jnp.where(jnp.isfinite(power), power * 2.0 ** -(limits.bits + 1), 0.0)


def is_measured(place: Place, counts: Counted) -> bool:
    """Whether an equation's results are measured: what counts, and all arithmetic in floats besides."""
    eqn, name = place.site.eqn, place.site.name
    if place.blocks or place.site.phase == RECOMPUTED or not _floats(eqn.outvars):
        return False
    if place.number in counts.activations | counts.gradients | counts.parameters:
        return True
    row = primitive(name)
    # What keeps values, or rounds them to integers, loses nothing in half that was not lost before.
    loses = not (row.keeps_values or row.exact or row.moves or row.op is Op.READ)
    return loses and bool(_floats(eqn.invars))


def _floats(variables: Iterable[Any]) -> list[int]:
    return [i for i, v in enumerate(variables) if is_inexact(v) and not np.issubdtype(v.aval.dtype, np.complexfloating)]


class RangeProbe(Probe):
    """Takes a tally of each equation's results, and the exponents of gradients.

    Args:
        block: the program.
        counts: which equations' results count as what.
        limits: of the half dtype that is asked about.
    """

    def __init__(self, block: Block, counts: Counted, limits: Limits):
        self.limits = limits
        self.places: Mapping[int, Place] = {p.number: p for p in block.places() if is_measured(p, counts)}
        self.graded = (counts.gradients | counts.parameters) & self.places.keys()

    def equation(
        self, place: Place, turn: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any], again: Callable[..., Any]
    ) -> dict[Key, Any]:
        notes: dict[Key, Any] = {}
        if place.number in self.places:
            floats = [outs[i] for i in _floats(place.site.eqn.outvars)]
            x = floats[0] if len(floats) == 1 else jnp.concatenate([out.ravel() for out in floats])
            notes["range", place.number] = tally_note(x, self.limits, _addends(place, ins, outs))
            if place.number in self.graded:
                notes["exponents", place.number] = exponents(x)
        return notes

    def keys(self, block: Block) -> Sequence[Key]:
        inside = [number for number in self.places if block.start <= number < block.end]
        return [*(("range", n) for n in inside), *(("exponents", n) for n in inside if n in self.graded)]

    def empty(self, key: Key) -> Any:
        if key[0] == "exponents":
            return jnp.zeros(BINS, jnp.uint32)
        return jnp.zeros(7, jnp.uint32), jnp.array([0.0, np.inf], jnp.float32)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        if key[0] == "exponents":
            return a + b
        (counts, (largest, smallest)), (more, (larger, smaller)) = a, b
        return counts + more, jnp.stack([jnp.maximum(largest, larger), jnp.minimum(smallest, smaller)])


def _addends(place: Place, ins: Sequence[Any], outs: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The numbers that an equation adds, with what they are added up to."""
    params, name = place.site.eqn.params, place.site.name
    if primitive(name).adds:
        return [(x, outs[0]) for x in ins if jnp.shape(x) == jnp.shape(outs[0])]
    if name == "reduce_sum":
        return [(ins[0], lax.expand_dims(outs[0], params["axes"]))]
    return [(ins[0], outs[0])] if name == "cumsum" else []
