"""The dtype lattice: how strongly a value asks for float32, and in which dtype it is stored."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

from mpjax._jaxpr import compat
from mpjax.casting.uses import Use


class Level(enum.IntEnum):
    """Elements of the lattice: with several inputs, the highest wins.

    The first three are castable: they never force float32 on a half activation.
    """

    ZERO = 0  # A constant zero: where an accumulator starts.
    INPUT = 1  # An input of the function (a parameter, a batch) or a constant, as it is.
    COMPUTED = 2  # Computed from such values alone, before any operation that runs in half.
    HALF = 3  # An activation that counts as half, in whichever dtype it is stored.
    FLOAT = 4  # An activation that was computed in float32 because it must be.
    PINNED = 5  # float32 by the user's word, or a state that must not lose bits: never cast to half.

    __hash__ = int.__hash__  # Enum's own is slow enough to show in trace times.


class Storage(enum.IntEnum):
    """The dtype in which a value is stored."""

    MASK = -2  # Only where memory is counted: a bit for each element, such as its sign.
    TRACED = -1  # The dtype that it was traced with: integers, float64, float16 of the user's own.
    FULL = 0
    HALF = 1

    __hash__ = int.__hash__

    @property
    def bit(self) -> int:
        """Its place in a bit mask of storage dtypes."""
        return 1 << self if self >= 0 else 0


TRACED, FULL, HALF = Storage.TRACED, Storage.FULL, Storage.HALF


class Inferred(NamedTuple):
    """The level and the storage dtype of a float32 value of the traced program."""

    level: Level
    storage: Storage


PARAMETER = Inferred(Level.INPUT, FULL)


def storage_of(inferred: Inferred | None) -> Storage:
    """The dtype in which a value is handed over; None stands for a value that autocast leaves alone."""
    return TRACED if inferred is None else inferred.storage


def join(a: Level, b: Level) -> Level:
    """Least upper bound of two levels; values that meet are computed, not as they were."""
    return a if a == b else max(a, b, Level.COMPUTED)


def softened(level: Level, use: Use) -> Level:
    """The level that an infer reader sees: a value that a half operation reads is stored in half, for all readers."""
    return Level.HALF if level == Level.FLOAT and use & Use.HALF else level


def at_boundary(value: Inferred, use: Use) -> Inferred:
    """How a sub-jaxpr hands a value out: in half if it counts as half, or if every reader wants half."""
    if value.storage == HALF:
        return value
    if value.level == Level.HALF and use & Use.ANY_HALF:
        return Inferred(Level.HALF, HALF)
    if value.level == Level.FLOAT and use & Use.HALF and not use & (Use.FLOAT | Use.RETURNED):
        return Inferred(Level.HALF, HALF)
    return value


def carried(level: Level, use: Use) -> Inferred:
    """How a loop carries a value of this level."""
    level = softened(level, use)
    return Inferred(level, HALF if level == Level.HALF and use & Use.ANY_HALF else FULL)


def made_from(eqn: Any) -> Level:
    """The level of a float32 value that is made from no float32: from integers castable, from other floats not."""
    return Level.FLOAT if any(compat.is_inexact(v.aval) for v in eqn.invars) else Level.COMPUTED


def literal_level(literal: Any, half: np.dtype) -> Level:
    """The level of a scalar in the program's text: a number that half can't hold forces float32."""
    value = np.asarray(literal.val)
    if value.size != 1:
        return Level.INPUT
    size, limits = abs(float(value)), compat.finfo(half)
    if size == 0:
        return Level.ZERO
    representable = float(limits.smallest_subnormal) <= size <= float(limits.max)
    return Level.INPUT if representable or not np.isfinite(size) else Level.FLOAT


def exact_in_half(literal: Any, half: np.dtype) -> bool:
    """Whether half holds a scalar of the program's text without rounding."""
    value = np.asarray(literal.val)
    with np.errstate(over="ignore"):  # A mask of -1e38 overflows, which is the answer.
        return bool(np.all(value.astype(half).astype(value.dtype) == value))
