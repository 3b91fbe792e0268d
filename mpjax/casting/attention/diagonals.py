"""Constant masks that depend on the distance of key and query alone: causal masks, windows, and what is made of them.

Such a mask is known from one number for each distance, so no array with an element for each score is made. That it
depends on nothing else is proved from the equations that make it: a comparison of two positions depends on their
difference, and an operation on each element depends on no more than its operands do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax.casting.attention.axes import Axis, Dims, flat
from mpjax.casting.attention.flat import Inlined
from mpjax.program import compat
from mpjax.program.primitives import primitive

# By name: what an operation does to positions is its own.

# A value that no rule here covers is evaluated as a whole if it is small.
_SMALL = 2**16
_BLOCK = 2**20


class Line(NamedTuple):
    """What the elements of an array depend on: the sum over its dimensions of the index times a coefficient.

    Args:
        coefficients: For each dimension; all 0 if the elements are equal.
        affine: Whether the element is that sum itself, plus a constant.
    """

    coefficients: tuple[int, ...]
    affine: bool = False

    @property
    def direction(self) -> tuple[int, ...]:
        """The coefficients without their common factor and sign."""
        divisor = math.gcd(*self.coefficients) or 1
        sign = next((1 if c > 0 else -1 for c in self.coefficients if c), 1)
        return tuple(sign * c // divisor for c in self.coefficients)


class Diagonals:
    """The constants of a program, by distance."""

    def __init__(self, flow: Inlined):
        self._flow = flow
        self._lines: dict[Any, Line | None] = {}

    def values(self, v: Any, dims: Dims, queries: Sequence[Axis], keys: Sequence[Axis]) -> np.ndarray | None:
        """The elements of a constant by distance, key minus query, from the first key's to the last key's.

        Args:
            v: A variable.
            dims: Its axes.
            queries, keys: The axes of queries and of keys.

        Returns:
            An array [queries + keys - 1]; None if the variable depends on an input, or on more than the distance.
        """
        roles = [_role(dim, queries, keys) for dim in dims]
        sizes = [math.prod(axis.size for axis in axes) for axes in (queries, keys)]
        line = self._line(v) if all(isinstance(n, int) for n in sizes) else None
        if line is None:
            return None
        slopes = [0, 0]
        for role, c in zip(roles, line.coefficients, strict=True):
            if role is None and c:
                return None
            if role is not None:
                slopes[role] += c
        if slopes[0] != -slopes[1]:
            return None
        distance = np.arange(1 - sizes[0], sizes[1])
        at = np.maximum(-distance, 0), np.maximum(distance, 0)
        index = [np.zeros_like(distance) if role is None else at[role] for role in roles]
        with jax.ensure_compile_time_eval():
            return np.broadcast_to(np.asarray(self._at(v, tuple(index))), distance.shape)

    def _line(self, v: Any) -> Line | None:
        if isinstance(v, compat.Literal):
            return Line((0,) * np.ndim(v.val), affine=True)
        if v not in self._lines:
            self._lines[v] = self._made(v) if self._flow.is_constant(v) else None
        return self._lines[v]

    def _made(self, v: Any) -> Line | None:
        eqn = self._flow.maker(v)
        if eqn is None:
            return _line_of(np.asarray(self._flow.consts[v])) if v in self._flow.consts else None
        lines = [self._line(x) for x in eqn.invars]
        if eqn.primitive.name == "iota":
            dimension = eqn.params["dimension"]
            return Line(tuple(int(d == dimension) for d in range(v.aval.ndim)), affine=_counts(v.aval.dtype))
        if None not in lines:
            known: list[Any] = lines
            if primitive(eqn.primitive.name).pointwise:
                found = _pointwise(eqn, known)
                if found is not None:
                    return found
            elif (places := _places(eqn)) is not None:
                of_operand = known[0].coefficients
                return known[0]._replace(coefficients=tuple(0 if d is None else of_operand[d] for d in places))
        value = self._flow.constant(v, _SMALL)
        return None if value is None else _line_of(value)

    def _at(self, v: Any, index: tuple[np.ndarray, ...]) -> Any:
        """The elements of a variable that has a `Line` at some indices."""
        if isinstance(v, compat.Literal):
            return np.asarray(v.val)
        eqn = self._flow.maker(v)
        if eqn is None:
            return np.asarray(self._flow.consts[v])[index]
        if eqn.primitive.name == "iota":
            return index[eqn.params["dimension"]].astype(eqn.params["dtype"])
        lines: list[Any] = [self._line(x) for x in eqn.invars]
        if None not in lines:
            if primitive(eqn.primitive.name).pointwise and _pointwise(eqn, lines):
                count = index[0].shape if index else ()
                arrays = [self._at(x, index if np.ndim(x.aval) else ()) for x in eqn.invars]
                dtypes = [x.aval.dtype for x in eqn.invars]
                arrays = [np.broadcast_to(np.asarray(y, t), count) for y, t in zip(arrays, dtypes, strict=True)]
                return eqn.primitive.bind(*map(jax.numpy.asarray, arrays), **eqn.params)
            if (places := _places(eqn)) is not None:
                shape = eqn.invars[0].aval.shape
                inner = [np.zeros_like(index[0]) if index else np.zeros((), int) for _ in shape]
                for i, d in zip(index, places, strict=True):
                    if d is not None:
                        inner[d] = i + (eqn.params["start_indices"][d] if eqn.primitive.name == "slice" else 0)
                return self._at(eqn.invars[0], tuple(inner))
        return np.asarray(self._flow.constant(v, _SMALL))[index]


def _role(dim: Sequence[Axis], queries: Sequence[Axis], keys: Sequence[Axis]) -> int | None:
    """Whether a dimension is that of the queries (0), that of the keys (1), or another."""
    axes = flat(dim)
    return None if not axes else 0 if axes == tuple(queries) else 1 if axes == tuple(keys) else None


def _counts(dtype: Any) -> bool:
    """Whether a dtype counts the positions of any sequence exactly."""
    return np.dtype(dtype).itemsize >= 4


def _pointwise(eqn: Any, lines: Sequence[Line]) -> Line | None:
    """The line of the result of an operation on each element; None if its operands have several directions."""
    count = eqn.outvars[0].aval.ndim
    wide = [line if line.coefficients else Line((0,) * count, line.affine) for line in lines]
    name, compares = eqn.primitive.name, primitive(eqn.primitive.name).compares
    if all(line.affine for line in wide):
        first, *rest = (np.array(line.coefficients, int) for line in wide)
        if compares:
            return Line(tuple(map(int, first - rest[0])))
        if _counts(eqn.outvars[0].aval.dtype):
            if name in ("add", "sub"):
                return Line(tuple(map(int, first + rest[0] if name == "add" else first - rest[0])), affine=True)
            if name in ("neg", "convert_element_type", "copy"):
                return Line(tuple(map(int, -first if name == "neg" else first)), affine=True)
    directions = {line.direction for line in wide if any(line.coefficients)}
    if len(directions) > 1:
        return None
    return Line(directions.pop() if directions else (0,) * count)


def _places(eqn: Any) -> list[int | None] | None:
    """For each dimension of the result of a move, that of the operand; None for one of size 1 or of copies."""
    if not eqn.invars:
        return None
    shape, out, params = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, eqn.params
    match eqn.primitive.name:
        case "transpose":
            return list(params["permutation"])
        case "broadcast_in_dim":
            places: list[int | None] = [None] * len(out)
            for d, at in enumerate(params["broadcast_dimensions"]):
                places[at] = d if shape[d] != 1 else None
            return places
        case "slice" if not any(s != 1 for s in params["strides"] or ()):
            return list(range(len(out)))
        case "reshape" | "squeeze" | "expand_dims":
            wide = [d for d, n in enumerate(shape) if n != 1]
            if [shape[d] for d in wide] != [n for n in out if n != 1]:
                return None
            following = iter(wide)
            return [None if n == 1 else next(following) for n in out]
        case "pvary" | "copy_p" | "name" | "sharding_constraint" | "stop_gradient":
            return list(range(len(out)))
    return None


def _line_of(value: np.ndarray) -> Line | None:
    """The line of an array: along one dimension, or along the difference of two. None if it has none."""
    wide = [d for d, n in enumerate(value.shape) if n != 1]
    # Without dimensions whose elements are all equal.
    for d in list(wide):
        if len(wide) > 2 and _is_copied(value, d):
            value = value[(*[slice(None)] * d, slice(1))]
            wide.remove(d)
    if len(wide) > 2:
        return None
    coefficients = [0] * value.ndim
    if len(wide) == 1:
        steps = value.reshape(-1)
        coefficients[wide[0]] = 1
        affine = steps.dtype.kind in "iu" and _counts(steps.dtype) and (np.diff(steps) == 1).all()
        return Line(tuple(coefficients), bool(affine))
    if len(wide) == 2:
        matrix = value.reshape([value.shape[d] for d in wide])
        if not _by_distance(matrix):
            return None
        coefficients[wide[0]], coefficients[wide[1]] = -1, 1
    return Line(tuple(coefficients))


def _is_copied(value: np.ndarray, axis: int) -> bool:
    slices = np.moveaxis(value, axis, 0)
    return all(np.array_equal(slices[0], each) for each in slices[1:])


def _by_distance(matrix: np.ndarray) -> bool:
    """Whether each diagonal of a matrix has equal elements, looked at in blocks of rows."""
    rows = max(1, _BLOCK // matrix.shape[1])
    above, below = matrix[:-1, :-1], matrix[1:, 1:]
    return all(np.array_equal(above[i : i + rows], below[i : i + rows]) for i in range(0, len(above), rows))


def every_query_reads(visible: np.ndarray, queries: int) -> bool:
    """Whether every query reads a key, given for each distance whether it is read."""
    total = np.concatenate(([0], np.cumsum(visible)))
    keys = len(visible) - queries + 1
    first = np.arange(queries)[::-1]  # The place of the first key's distance.
    return bool((total[first + keys] > total[first]).all())
