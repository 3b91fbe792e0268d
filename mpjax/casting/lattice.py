"""The dtype lattice: how strongly a value requires float32, and its storage dtype."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

from mpjax.casting.uses import Use
from mpjax.program import compat


class Level(enum.IntEnum):
    """Elements of the lattice. With several inputs, the highest wins.

    The first four levels are castable: they never force float32 on a half activation.
    """

    ZERO = 0  # A constant zero, the initial value of an accumulator.
    INPUT = 1  # An unchanged input of the function (a parameter, a batch) or a constant.
    COMPUTED = 2  # Computed only from such values, before any operation that runs in half.
    LOOKED_UP = 3  # The same, but an activation: rows of a table, selected for each position of a batch.
    HALF = 4  # An activation that counts as half, whatever its storage dtype.
    FLOAT = 5  # An activation that was computed in float32 because it must be.
    PINNED = 6  # float32 by the user's cast, or a state that must not lose bits. Never cast to half.

    __hash__ = int.__hash__  # Enum's __hash__ is slow enough to show in trace times.


class Storage(enum.IntEnum):
    """The dtype in which a value is stored."""

    MASK = -2  # One bit per element, such as its sign; used only to estimate memory.
    TRACED = -1  # The traced dtype: integers, float64, the user's own float16.
    FULL = 0
    HALF = 1

    __hash__ = int.__hash__

    @property
    def bit(self) -> int:
        """Its bit in a bit mask of storage dtypes."""
        return 1 << self if self >= 0 else 0


TRACED, FULL, HALF = Storage.TRACED, Storage.FULL, Storage.HALF


class Beyond(enum.IntFlag):
    """Where numbers of a constant lie that half can't represent."""

    NONE = 0
    LOW = 1  # below its range
    HIGH = 2  # above
    INSIDE = 4  # too small, so that nothing of them is left


class Inferred(NamedTuple):
    """The level and the storage dtype of a float32 value of the traced program.

    Args:
        level: Its level.
        storage: Its storage dtype.
        integers: Whether it holds integers by construction: counts, masks, labels, permutations.
        beyond: Where it holds a constant's numbers that half can't represent.
        copied: Whether it is a float32 sum, of a residual stream, of which each layer reads and keeps a half copy. The
            rounding of a copy is not added to, as that of the sum would be.
        gated: Whether it is a state that a loop carries in float32 and multiplies in each step, such as the cell of an
            LSTM. The backward pass keeps a half copy of it.
    """

    level: Level
    storage: Storage
    integers: bool = False
    beyond: Beyond = Beyond.NONE
    copied: bool = False
    gated: bool = False


PARAMETER = Inferred(Level.INPUT, FULL)
STREAM = Inferred(Level.HALF, FULL, copied=True)
NORMALIZED = Inferred(Level.HALF, FULL, gated=True)


def castable(value: Inferred) -> bool:
    """Whether a value is a parameter or an input, or computed only from these; not rows that a batch looks up."""
    return value.level <= Level.COMPUTED


def storage_of(inferred: Inferred | None) -> Storage:
    """The storage dtype of a value; TRACED if autocast leaves the value alone (None)."""
    return TRACED if inferred is None else inferred.storage


def join(a: Level, b: Level) -> Level:
    """Least upper bound of two levels. Two different levels join to at least COMPUTED."""
    return a if a == b else max(a, b, Level.COMPUTED)


def softened(level: Level, use: Use) -> Level:
    """The level for consumers on the infer list: what a half operation reads as well counts as half for all.

    Then it is stored once. Unless one of them amplifies its rounding: it is read unrounded, and stored twice.
    """
    return Level.HALF if level == Level.FLOAT and use & Use.HALF and not use & Use.AMPLIFIED else level


def at_boundary(value: Inferred, use: Use, inlined: bool = False) -> Inferred:
    """How a sub-jaxpr returns a value: in half if it counts as half, or if every consumer reads half.

    Not if a consumer amplifies its rounding, or a loop sums it up. What a `jit` returns is rounded as without it: where
    matmuls alone read it.
    """
    if value.storage == HALF or value.copied or use & (Use.AMPLIFIED | Use.SUMMED):
        return value
    if inlined and use & Use.MAY_HALF:
        return value
    if value.level == Level.HALF and use & (Use.HALF | Use.MAY_HALF):
        return Inferred(Level.HALF, HALF)
    if value.level == Level.FLOAT and use & Use.HALF and not use & (Use.FLOAT | Use.RETURNED):
        return Inferred(Level.HALF, HALF)
    return value


def carried(level: Level, use: Use) -> Inferred:
    """How a loop carries a value of this level: in half if a matmul reads it, and nothing amplifies its rounding."""
    if level == Level.FLOAT and use & Use.HALF and not use & Use.AMPLIFIED:
        level = Level.HALF
    return Inferred(level, HALF if level == Level.HALF and use & Use.ANY_HALF and not use & Use.AMPLIFIED else FULL)


def made_from(eqn: Any) -> Level:
    """The level of a float32 value without float32 inputs: castable if made from integers, not from other floats."""
    return Level.FLOAT if any(compat.is_inexact(v.aval) for v in eqn.invars) else Level.COMPUTED


def literal_level(literal: Any, half: np.dtype) -> Level:
    """The level of a literal. A number outside half's range forces float32."""
    value = np.asarray(literal.val)
    if value.size != 1:
        return Level.INPUT
    size, limits = abs(float(value)), compat.finfo(half)
    if size == 0:
        return Level.ZERO
    representable = float(limits.smallest_subnormal) <= size <= float(limits.max)
    return Level.INPUT if representable or not np.isfinite(size) else Level.FLOAT
