"""Reads labels: arrays over the vocabulary that differ at them alone, and gathers of one element of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow
from mpjax.program.host import bind_on_host
from mpjax.program.primitives import primitive

# By name: labels are found by how they are compared and gathered.

_DEEP = 12  # operations between a comparison and what reads the labels: an operand may be read twice by each


class Layout(NamedTuple):
    """The sizes of an array of logits, and which axis is the vocabulary."""

    sizes: tuple[int, ...]
    axis: int

    @property
    def rows(self) -> tuple[int, ...]:
        """The sizes without the vocabulary."""
        return (*self.sizes[: self.axis], *self.sizes[self.axis + 1 :])

    @property
    def of_row(self) -> tuple[int, ...]:
        """The sizes of what is the same for all of the vocabulary."""
        return (*self.sizes[: self.axis], 1, *self.sizes[self.axis + 1 :])

    @property
    def of_vocabulary(self) -> tuple[int, ...]:
        """The sizes of what is the same in all rows."""
        return tuple(n if d == self.axis else 1 for d, n in enumerate(self.sizes))

    def place_of(self, axis: int) -> int:
        """The place of another axis among those of the rows."""
        return axis - (axis > self.axis)

    def reshaped(self, sizes: Sequence[int]) -> Layout | None:
        """The layout of the same elements in another shape; None if it has no axis for the vocabulary."""
        before, size = math.prod(self.sizes[: self.axis]), self.sizes[self.axis]
        axes = (d for d, n in enumerate(sizes) if n == size and math.prod(sizes[:d]) == before)
        axis = next(axes, None)
        return None if axis is None else Layout(tuple(sizes), axis)


class Labels(NamedTuple):
    """Numbers that are the same for all of the vocabulary but the label: a factor for each label, and the rest.

    All are multiplied or divided (`mul`, `div`) by variables that are the same in a row: the weights of examples.
    """

    factors: tuple[tuple[Any, float], ...]
    rest: float = 0.0
    weights: tuple[tuple[str, Any], ...] = ()

    @property
    def is_hot(self) -> bool:
        """Whether they are 1 at one label, and 0 elsewhere."""
        return [factor for _, factor in self.factors] == [1.0] and not self.rest and not self.weights


def times(labels: Labels, number: float) -> Labels:
    factors = tuple((y, f * number) for y, f in labels.factors)
    return labels._replace(factors=factors, rest=labels.rest * number)


def unvaried(flow: Dataflow, x: Any) -> Any:
    """An operand before it is marked as one that differs by device of a `shard_map`."""
    while (maker := flow.maker(x)) is not None and maker.primitive.name == "pvary":
        x = maker.invars[list(maker.outvars).index(x)]
    return x


def number_of(flow: Dataflow, x: Any) -> float | None:
    """The one number that all elements of an operand are; None if they aren't."""
    x = unvaried(flow, x)
    if isinstance(x, compat.Literal):
        return float(np.asarray(x.val)) if np.ndim(x.val) == 0 else None
    maker = flow.maker(x)
    if maker is None:
        return None
    if maker.primitive.name in ("broadcast_in_dim", "convert_element_type"):
        return number_of(flow, maker.invars[0])
    row = primitive(maker.primitive.name)
    numbers = [number_of(flow, y) for y in maker.invars] if row.pointwise and not x.aval.shape else [None]
    if None in numbers:
        return None
    arrays = [np.asarray(n, y.aval.dtype) for n, y in zip(numbers, maker.invars, strict=True)]
    found = bind_on_host(maker, arrays, wide=False)
    return float(found[0]) if found and found[0] is not None else None


def scalar_of(flow: Dataflow, x: Any) -> Any:
    """The float32 scalar that an operand is made of; None if its elements differ, or may."""
    if isinstance(x, compat.Literal) or not tracked(x):
        return None
    if compat.numel(x.aval) == 1:
        return x
    maker = flow.maker(x)
    repeats = maker is not None and maker.primitive.name in ("broadcast_in_dim", "reshape")
    return scalar_of(flow, maker.invars[0]) if repeats else None


def labels_of(flow: Dataflow, x: Any, layout: Layout, depth: int = _DEEP) -> Labels | None:
    """An operand as numbers that differ at labels only; None for others, and after more than `depth` operations."""
    eqn = flow.maker(unvaried(flow, x))
    if eqn is None or x.aval.shape != layout.sizes or not depth:
        return None
    name, ins, rows = eqn.primitive.name, eqn.invars, layout.of_row
    if name == "select_n" and len(ins) == 3:
        off, on, hit = number_of(flow, ins[1]), number_of(flow, ins[2]), labels_of(flow, ins[0], layout, depth - 1)
        if off is not None and on is not None and hit is not None and hit.rest == 0 and not hit.weights:
            return times(hit, on - off)._replace(rest=off)
    elif name == "gt":
        hot, least = labels_of(flow, ins[0], layout, depth - 1), number_of(flow, ins[1])
        return hot if hot is not None and hot.is_hot and least is not None and 0 <= least < 1 else None
    elif name == "eq":
        for i in (0, 1):
            if _counts(flow, ins[i], layout) and (label := broadcast_of(flow, ins[1 - i], rows)) is not None:
                return Labels(((label, 1.0),))
    elif name == "convert_element_type":
        labels = labels_of(flow, ins[0], layout, depth - 1)
        exact = compat.is_inexact(x.aval) or (labels is not None and labels.is_hot)
        return labels if exact else None  # 0.5 is 0 as an integer, and true.
    elif name in ("mul", "add", "div", "sub"):
        for i in (0, 1) if name in ("mul", "add") else (0,):
            labels = None if isinstance(ins[i], compat.Literal) else labels_of(flow, ins[i], layout, depth - 1)
            if labels is None:
                continue
            if name in ("mul", "div"):
                return scaled(flow, labels, name, ins[1 - i], rows)
            number, sign = number_of(flow, ins[1 - i]), 1.0 if name == "add" else -1.0
            more = labels_of(flow, ins[1 - i], layout, depth - 1) if number is None else Labels((), number)
            if more is not None and not labels.weights and not more.weights:
                return Labels((*labels.factors, *times(more, sign).factors), labels.rest + sign * more.rest)
    return None


def scaled(flow: Dataflow, labels: Labels, how: str, by: Any, rows: Sequence[int]) -> Labels | None:
    """Labels, multiplied or divided by a number or by what is the same in a row; None if it is neither."""
    if (number := number_of(flow, by)) is not None:
        return times(labels, number if how == "mul" else 1 / number)
    weight = broadcast_of(flow, by, rows)
    return None if weight is None else labels._replace(weights=(*labels.weights, (how, weight)))


def _counts(flow: Dataflow, x: Any, layout: Layout) -> bool:
    """Whether an operand counts the vocabulary, in a dtype that holds its numbers."""
    size, axis = layout.sizes[layout.axis], layout.axis
    while (eqn := flow.maker(unvaried(flow, x))) is not None and _holds(x.aval.dtype, size):
        name = eqn.primitive.name
        if x.aval.shape[axis] != size:
            return False
        if name == "iota":
            return bool(eqn.params["dimension"] == axis)
        if name == "broadcast_in_dim" and axis in (dims := eqn.params["broadcast_dimensions"]):
            axis = dims.index(axis)
        elif name == "reshape" and (before := Layout(x.aval.shape, axis).reshaped(eqn.invars[0].aval.shape)):
            axis = before.axis
        elif name != "convert_element_type":
            return False
        x = eqn.invars[0]
    return False


def broadcast_of(flow: Dataflow, x: Any, sizes: Sequence[int]) -> Any:
    """The variable that an operand repeats, with an element for each of the sizes, 1 where it repeats; else None."""
    if not isinstance(x, compat.Literal) and x.aval.shape == tuple(sizes):
        return x
    eqn = flow.maker(unvaried(flow, x))
    if eqn is None or eqn.primitive.name != "broadcast_in_dim" or isinstance(eqn.invars[0], compat.Literal):
        return None
    (source,) = eqn.invars
    dims, shape = eqn.params["broadcast_dimensions"], source.aval.shape
    varies_there = all(n in (1, sizes[d]) for n, d in zip(shape, dims, strict=True))
    return source if varies_there and math.prod(shape) == math.prod(sizes) else None


def gathered(flow: Dataflow, eqn: Any, layout: Layout) -> Any:
    """The labels of a gather that takes one element of each row; None if it takes others."""
    indices, params, rows = eqn.invars[1], eqn.params, layout.rows
    numbers, others = params["dimension_numbers"], [d for d in range(len(layout.sizes)) if d != layout.axis]
    sizes = {math.prod(rows), eqn.outvars[0].aval.size}
    if set(params["slice_sizes"]) != {1} or len(sizes) != 1 or indices.aval.dtype != np.int32:
        return None
    if numbers.start_index_map == (layout.axis,) and indices.aval.size in sizes:  # `take_along_axis`
        batched = [d for d in others if d in numbers.operand_batching_dims or layout.sizes[d] == 1]
        return indices if batched == others else None
    joined = flow.maker(indices) if numbers.start_index_map == tuple(range(len(layout.sizes))) else None
    if joined is None or joined.primitive.name != "concatenate" or len(joined.invars) != len(layout.sizes):
        return None
    # `logits[jnp.arange(rows), labels]`
    places, label = [joined.invars[d] for d in others], joined.invars[layout.axis]
    counted = (_equals(_known(flow, v), place) for v, place in zip(places, np.indices(rows, np.int32), strict=True))
    return label if label.aval.size in sizes and all(counted) else None


def _equals(found: Any, place: Any) -> bool:
    return found is not None and found.size == place.size and np.array_equal(found.ravel(), place.ravel())


def _known(flow: Dataflow, x: Any) -> Any:
    """An operand as an array of NumPy; None if it follows from what the program is given."""
    if isinstance(x, compat.Literal):
        aval: Any = x.aval
        return np.asarray(x.val, aval.dtype)
    maker, arrays = flow.maker(x), []
    for operand in maker.invars if maker is not None else ():
        arrays.append(_known(flow, operand))
        if arrays[-1] is None:
            return None
    found = bind_on_host(maker, arrays, wide=False) if maker is not None else None
    return None if found is None else found[list(maker.outvars).index(x)]


def _holds(dtype: Any, count: int) -> bool:
    """Whether a dtype holds all integers below a count."""
    if np.issubdtype(dtype, np.integer):
        return int(np.iinfo(dtype).max) >= count - 1
    return bool(jnp.issubdtype(dtype, jnp.floating) and count <= 2 ** (compat.finfo(dtype).nmant + 1))
