"""Masks and biases of an attention, as a program writes them.

A number below every float16 hides a key: no score in half is lower, and added to a score in half it leaves nothing of
it. Any other number is a bias, or no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.casting.attention.axes import Axis, Dims, Unfit, flat, of_operand
from mpjax.casting.attention.diagonals import Diagonals, every_query_reads
from mpjax.casting.attention.flat import Inlined
from mpjax.casting.attention.layout import size_of
from mpjax.casting.attention.parts import Attention, Bias, Mask
from mpjax.program import compat

# By name: each of these operations changes in its own way what a mask means.

HIDES = float(compat.finfo(np.dtype(np.float16)).min)


def add_bias(flow: Inlined, attention: Attention, v: Any, dims: Dims, factor: float) -> None:
    """Notes an array that is added to the scores, as biases and masks."""
    v, dims = flow.stripped(v, dims)
    eqn = flow.maker(v)
    name = eqn.primitive.name if eqn is not None else ""
    if not flow.is_constant(v):
        if name == "add":
            for operand in eqn.invars:
                add_bias(flow, attention, operand, of_operand(operand, dims), factor)
            return
        if name == "select_n" and len(eqn.invars) == 3:
            which, *cases = eqn.invars
            for i, (other, case) in enumerate(zip(cases[::-1], cases, strict=True)):
                number = flow.scalar(case)
                if number is not None and number * factor <= HIDES:
                    add_mask(flow, attention, which, of_operand(which, dims), i == 1, number * factor)
                    add_bias(flow, attention, other, of_operand(other, dims), factor)
                    return
    if flow.scalar(v) is None:  # A number added to all scores of a row changes nothing.
        attention.biases.append(Bias(v, dims, factor))


def add_mask(flow: Inlined, attention: Attention, which: Any, dims: Dims, inverted: bool, number: float) -> None:
    """Notes a boolean array that selects keys, as masks.

    Raises:
        Unfit: It hides every key.
    """
    v, dims = flow.stripped(which, dims)
    if isinstance(v, compat.Literal):
        if bool(v.val) == inverted:
            raise Unfit
        return
    eqn = flow.maker(v)
    name = eqn.primitive.name if eqn is not None else ""
    if name == "not":
        return add_mask(flow, attention, eqn.invars[0], dims, not inverted, number)
    if name == ("or" if inverted else "and"):
        for operand in eqn.invars:
            add_mask(flow, attention, operand, of_operand(operand, dims), inverted, number)
        return
    compared = flow.scalar(eqn.invars[1]) if name in ("ne", "eq") else None
    if compared in (0.0, 1.0):  # A comparison of numbers that were booleans.
        source, of_source = flow.stripped(eqn.invars[0], dims, casts=True)
        if source.aval.dtype == np.bool_:
            keeps = (name == "ne") == (compared == 0.0)
            return add_mask(flow, attention, source, of_source, inverted == keeps, number)
    attention.masks.append(Mask(v, dims, inverted, number))


class Resolved(NamedTuple):
    """What selects keys, after the masks that depend on no input but the distance of query and key were evaluated.

    Args:
        window: The keys (left, right) of each query's own position that it reads by those masks; None on a side without
            a limit.
        masks, biases: The others.
        nan: Whether a row without a key may exist, which is NaN as written.
    """

    window: tuple[int | None, int | None]
    masks: list[Mask]
    biases: list[Bias]
    nan: bool


def resolved(attention: Attention, flow: Inlined, queries: Sequence[Axis]) -> Resolved:
    """Evaluates the masks and biases that depend on no input but the distance of query and key.

    Args:
        attention: The attention.
        flow: The program.
        queries: Those axes of the queries that are rows of the scores.
    """
    keys = flat(attention.keys)
    constants, count = Diagonals(flow), size_of(queries)
    visible = np.ones(count + size_of(keys) - 1, bool) if attention.added else np.ones(0, bool)
    masks: list[Mask] = []
    biases: list[Bias] = []
    known: list[Mask | Bias] = []
    for mask in attention.masks:
        values = constants.values(mask.v, mask.dims, queries, keys)
        if values is None:
            masks.append(mask)
        else:
            known.append(mask)
            visible = visible & (values ^ mask.inverted)
    infinite = bool(attention.masks) and all(mask.number == -np.inf for mask in attention.masks)
    nan = infinite and (bool(masks) or not every_query_reads(visible, count))
    for bias in attention.biases:
        values = constants.values(bias.v, bias.dims, queries, keys)
        hidden = np.zeros_like(visible) if values is None else values * bias.factor <= HIDES
        # Where all keys are hidden, the number is added to all scores of a row, which changes nothing.
        hides = values is not None and hidden.any() and not values[~hidden].any()
        if hides and every_query_reads(visible & ~hidden, count):
            known.append(bias)
            visible = visible & ~hidden
        else:
            biases.append(bias)
    window = _window(visible, count)
    if window is None:
        masks += [each for each in known if isinstance(each, Mask)]
        biases += [each for each in known if isinstance(each, Bias)]
    return Resolved(window or (None, None), masks, biases, nan)


def _window(visible: np.ndarray, queries: int) -> tuple[int | None, int | None] | None:
    """The window of the distances that are read; None if they are none."""
    if visible.all():
        return None, None
    (read,) = visible.nonzero()
    if not len(read) or read[-1] - read[0] != len(read) - 1:
        return None
    left, right = queries - 1 - int(read[0]), int(read[-1]) - (queries - 1)
    if left < 0 or right < 0:
        return None
    return left if read[0] else None, right if read[-1] != len(visible) - 1 else None
