"""Axes of the arrays of an attention, followed through transposes and reshapes.

Each dimension of an array is a tuple of axes: a reshape merges them, or splits one. Dimensions of size 1 have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

# By name: how axes move is in the parameters of each move.


class Unfit(Exception):
    """An operation doesn't keep the axes apart."""


class Axis:
    """An axis of the attention, such as the heads. A reshape may split it later."""

    __slots__ = ("parts", "size")

    def __init__(self, size: int):
        self.size = size
        self.parts: tuple[Axis, ...] = (self,)

    def split(self, size: int) -> None:
        """Splits the axis into one of this size and the rest."""
        if self.size % size:
            raise Unfit
        self.parts = (Axis(size), Axis(self.size // size))


Dims = tuple[tuple[Axis, ...], ...]


def fresh(shape: Iterable[int]) -> Dims:
    """New axes for an array."""
    return tuple((Axis(n),) if n != 1 else () for n in shape)


def flat(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes, those that were split replaced by their parts."""
    whole: list[Axis] = []
    for axis in axes:
        whole.extend([axis] if axis.parts == (axis,) else flat(axis.parts))
    return tuple(whole)


def joined(dims: Iterable[tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """All axes of some dimensions."""
    return flat(axis for dim in dims for axis in dim)


def reshaped(dims: Dims, shape: Sequence[int]) -> Dims:
    """The axes of an array after a reshape."""
    waiting = list(joined(dims))[::-1]
    result = []
    for n in shape:
        taken: list[Axis] = []
        while (rest := n // math.prod(axis.size for axis in taken)) > 1:
            if not waiting:
                raise Unfit
            axis = waiting.pop()
            if rest % axis.size:
                axis.split(rest)
                waiting += axis.parts[::-1]
            else:
                taken.append(axis)
        result.append(tuple(taken))
    if waiting:
        raise Unfit
    return tuple(result)


def of_operand(v: Any, dims: Dims) -> Dims:
    """The axes of an operand of an elementwise operation, which may be smaller than the result."""
    return tuple(dim if n != 1 else () for n, dim in zip(v.aval.shape, dims, strict=True)) if v.aval.shape else ()


def upstream(eqn: Any, dims: Dims) -> Dims:
    """The axes of the operand of a move, given those of its result."""
    if not eqn.invars:  # An `iota` moves nothing.
        raise Unfit
    shape, params = eqn.invars[0].aval.shape, eqn.params
    match eqn.primitive.name:
        case "transpose":
            return tuple(dims[params["permutation"].index(d)] for d in range(len(shape)))
        case "broadcast_in_dim":
            pairs = zip(shape, params["broadcast_dimensions"], strict=True)
            return tuple(dims[d] if n != 1 else () for n, d in pairs)
        case "reshape" if params.get("dimensions") is None:
            return reshaped(dims, shape)
        case "squeeze" | "expand_dims":
            return reshaped(dims, shape)
        case "convert_element_type" | "copy" | "copy_p" | "name" | "pvary":
            return dims
    raise Unfit


def downstream(eqn: Any, dims: Dims) -> Dims:
    """The axes of the result of a move, given those of its operand."""
    shape, params = eqn.outvars[0].aval.shape, eqn.params
    match eqn.primitive.name:
        case "transpose":
            return tuple(dims[d] for d in params["permutation"])
        case "broadcast_in_dim" if eqn.invars[0].aval.size == eqn.outvars[0].aval.size:
            return reshaped(dims, shape)
        case "reshape" if params.get("dimensions") is None:
            return reshaped(dims, shape)
        case "squeeze" | "expand_dims":
            return reshaped(dims, shape)
        case "convert_element_type" | "copy" | "copy_p" | "name" | "pvary":
            return dims
    raise Unfit
