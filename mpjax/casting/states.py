"""What a plan says of a value: where it comes from, and in which dtype it is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpjax._jaxpr import compat
from mpjax.casting.demand import HALVES, RETURNED, WANT_FLOAT, WANT_HALF

# Kinds, in the order in which they win when an operation has several inputs. The first three are
# castable: they never force float32 on a half activation.
ZERO = 0  # a constant zero: where an accumulator starts
INPUT = 1  # an input of the function (a parameter, a batch) or a constant, as it is
COMPUTED = 2  # computed from such alone, before any operation that runs in half
HALF = 3  # an activation that counts as half, in whichever dtype it is stored
FLOAT = 4  # an activation that was computed in float32 because it must be
PINNED = 5  # float32 by the user's word, or a state that must not lose bits: never taken down

FULL, LOW, RAW = 0, 1, -1  # the slots of a value: float32, half, and any other as it was traced


class State(NamedTuple):
    """A float32 value of the traced program: its kind, and the slot in which it is stored."""

    kind: int
    slot: int


def join(a: int, b: int) -> int:
    """The kind of a value that is now of one kind, now of the other."""
    return a if a == b else max(a, b, COMPUTED)


def softened(kind: int, flags: int) -> int:
    """The kind that an infer reader sees: what a half operation reads is stored in half, for all."""
    return HALF if kind == FLOAT and flags & WANT_HALF else kind


def at_boundary(state: State, flags: int) -> State:
    """How a program inside hands a value out: in half if it counts as half, or if only half is read."""
    if state.slot == LOW:
        return state
    if state.kind == HALF and flags & HALVES:
        return State(HALF, LOW)
    if state.kind == FLOAT and flags & WANT_HALF and not flags & (WANT_FLOAT | RETURNED):
        return State(HALF, LOW)
    return state


def carried(kind: int, flags: int) -> State:
    """How a loop carries a value of this kind."""
    kind = softened(kind, flags)
    return State(kind, LOW if kind == HALF and flags & HALVES else FULL)


def literal_kind(literal: Any, half: np.dtype) -> int:
    """The kind of a scalar in the program's text: one that half can't hold forces float32."""
    value = np.asarray(literal.val)
    if value.size != 1:
        return INPUT
    size, limits = abs(float(value)), compat.finfo(half)
    if size == 0:
        return ZERO
    representable = float(limits.smallest_subnormal) <= size <= float(limits.max)
    return INPUT if representable or not np.isfinite(size) else FLOAT


def exact_in_half(literal: Any, half: np.dtype) -> bool:
    """Whether half holds a scalar of the program's text without rounding."""
    value = np.asarray(literal.val)
    return bool(np.all(value.astype(half).astype(value.dtype) == value))
