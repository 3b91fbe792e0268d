"""Reads what is the same in all rows of logits, also if it is computed after it is repeated: biases and masks.

And what follows from one element of each row alone: functions of the label's probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from mpjax.casting.cross_entropy.labels import Layout, number_of, unvaried
from mpjax.kernels.derivatives import same_axes
from mpjax.program.dataflow import Dataflow
from mpjax.program.primitives import primitive

# By name: a row is computed by what computes all rows.

LABEL = "label"  # That of each row, as one of the variables that are read.
_MOST = 256  # operations: what is read twice is computed twice, and in turn what it reads


class Repeated(NamedTuple):
    """What an array repeats in all rows, or is at one label of each.

    Args:
        make: A function.
        of: The variables that it reads.
        size: The number of its operations.
    """

    make: Callable[..., Any]
    of: tuple[Any, ...] = ()
    size: int = 1


def repeated(flow: Dataflow, x: Any, layout: Layout, known: Mapping[Any, Any], at_label: bool = False) -> Any:
    """What an operand repeats in all rows, as `Repeated`, given what some variables repeat; None if rows differ.

    Or what it is at the labels; None if that follows from other elements of its row.
    """
    sizes, shape = layout.of_row if at_label else layout.of_vocabulary, x.aval.shape
    if (number := number_of(flow, x)) is not None:
        return Repeated(lambda: lax.full(sizes, number, x.aval.dtype))
    if x in known or shape == sizes:
        return known.get(x, Repeated(lambda y: y, (x,)))
    if at_label and layout.sizes != layout.of_vocabulary and (row := repeated(flow, x, layout, {})) is not None:
        return Repeated(lambda label, *arrays: row.make(*arrays).ravel()[label], (LABEL, *row.of), row.size)
    eqn = flow.maker(unvaried(flow, x))
    if eqn is None or shape != layout.sizes:
        return None
    if not at_label and eqn.primitive.name == "iota" and eqn.params["dimension"] == layout.axis:
        return Repeated(lambda: lax.broadcasted_iota(x.aval.dtype, sizes, layout.axis))
    if eqn.primitive.name == "broadcast_in_dim":
        (source,), dims = eqn.invars, eqn.params["broadcast_dimensions"]
        same = all(n in (1, sizes[d]) for n, d in zip(source.aval.shape, dims, strict=True))
        return Repeated(lambda y: lax.broadcast_in_dim(y, sizes, dims), (source,)) if same else None
    return computed(flow, eqn, layout, known, at_label)


def computed(flow: Dataflow, eqn: Any, layout: Layout, known: Mapping[Any, Any], at_label: bool = False) -> Any:
    """What the result of an elementwise equation repeats, or that of a scatter of one number; or at the labels."""
    if eqn.primitive.name == "scatter" and not at_label:
        (x, indices, updates), shape = eqn.invars, _shape_of_updates(eqn, layout)
        number = number_of(flow, updates)
        if shape is None or number is None:
            return None
        written = Repeated(lambda: lax.full(shape, number, np.float32))
        parts = iter([repeated(flow, x, layout, known), Repeated(lambda y: y, (indices,)), written])
    elif primitive(eqn.primitive.name).pointwise:
        parts = (repeated(flow, y, layout, known, at_label) for y in eqn.invars)
    else:
        return None
    found = []
    for part in parts:
        if part is None or part.size >= _MOST:
            return None
        found.append(part)

    def make(*arrays: Any) -> Any:
        rest = iter(arrays)
        operands = [part.make(*(next(rest) for _ in part.of)) for part in found]
        return eqn.primitive.bind(*same_axes(operands), **eqn.params)

    return Repeated(make, tuple(v for part in found for v in part.of), 1 + sum(part.size for part in found))


def mask_of(flow: Dataflow, select: Any, x: Any) -> tuple[Any, ...]:
    """What a select of an array compares as: the mask, the place of the array, and what stands for the rest."""
    mask, *cases = select.invars
    place = cases.index(x) if len(cases) == 2 else None
    return _origin(flow, mask), place, None if place is None else _origin(flow, cases[1 - place])


def _origin(flow: Dataflow, x: Any) -> Any:
    """What operands with equal elements have in common: a number, or what is repeated along which axes."""
    number, maker = number_of(flow, x), flow.maker(x)
    if number is None and maker is not None and maker.primitive.name == "broadcast_in_dim":
        return maker.invars[0], maker.params["broadcast_dimensions"], x.aval.shape
    return x if number is None else number


def _shape_of_updates(eqn: Any, layout: Layout) -> list[int] | None:
    """The shape of what a scatter writes to one row; None if it does not write to all rows alike."""
    numbers, shape = eqn.params["dimension_numbers"], eqn.invars[2].aval.shape
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    if numbers.scatter_dims_to_operand_dims != (layout.axis,) or not inserted <= {layout.axis}:
        return None
    windows = [n for d, n in enumerate(layout.of_vocabulary) if d not in inserted]
    ones = {place for n, place in zip(windows, numbers.update_window_dims, strict=True) if n == 1}
    whole = math.prod(shape[place] for place in ones) == math.prod(layout.rows)
    return [1 if place in ones else n for place, n in enumerate(shape)] if whole else None
