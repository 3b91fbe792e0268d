"""Masks and biases of an attention, as a program writes them.

A number below every float16 hides a key: no score in half is lower, and added to a score in half it leaves nothing of
it. Any other number is a bias, or no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.casting.attention.axes import Dims, Unfit, of_operand
from mpjax.casting.attention.flat import Inlined
from mpjax.casting.attention.layout import Layout, size_of
from mpjax.casting.attention.parts import Attention, Bias, Mask
from mpjax.program import compat

# By name: each of these operations changes in its own way what a mask means.

HIDES = float(compat.finfo(np.dtype(np.float16)).min)


def add_bias(flow: Inlined, attention: Attention, v: Any, dims: Dims, factor: float) -> None:
    """Notes an array that is added to the scores, as biases and masks."""
    v, dims = flow.stripped(v, dims)
    eqn = flow.maker(v)
    name = eqn.primitive.name if eqn is not None else ""
    if flow.constant(v) is None:
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
    """What selects keys, after the masks that depend on no input were evaluated.

    Args:
        window: The keys (left, right) of each query's own position that it reads by the constant masks.
        masks, biases: The others.
        nan: Whether a row without a key may exist, which is NaN as written.
    """

    window: tuple[int, int] | None
    masks: list[Mask]
    biases: list[Bias]
    nan: bool


def resolved(attention: Attention, flow: Inlined, scores: Sequence[Sequence[Any]], right: bool) -> Resolved:
    """Evaluates the masks and biases that depend on no input.

    Args:
        scores: The axes of batch, heads, queries and keys.
        right: Whether the kernel has windows with keys after the query's own position.
    """
    visible, masks, biases = np.ones([size_of(axes) for axes in scores[2:]], bool), [], []
    constant: list[Mask | Bias] = []
    for mask in attention.masks:
        array = _of_scores(flow.constant(mask.v), mask.dims, scores)
        if array is None:
            masks.append(mask)
        else:
            constant.append(mask)
            visible &= array ^ mask.inverted
    infinite = all(mask.number == -np.inf for mask in attention.masks)
    nan = bool(attention.masks) and infinite and (bool(masks) or not visible.any(1).all())
    for bias in attention.biases:
        array = _of_scores(flow.constant(bias.v), bias.dims, scores)
        if array is None:
            biases.append(bias)
            continue
        hidden = array * bias.factor <= HIDES
        # Where all keys are hidden, the number is added to all scores of a row, which changes nothing.
        if not hidden.any() or array[~hidden].any() or not (visible & ~hidden).any(1).all():
            biases.append(bias)
        else:
            constant.append(bias)
            visible &= ~hidden
    window = None if visible.all() else _window(visible)
    if not visible.all() and (window is None or (window[1] and not right)):
        masks += [each for each in constant if isinstance(each, Mask)]
        biases += [each for each in constant if isinstance(each, Bias)]
        window = None
    return Resolved(window, masks, biases, nan)


def _of_scores(value: np.ndarray | None, dims: Dims, scores: Sequence[Sequence[Any]]) -> np.ndarray | None:
    """A constant as an array of queries and keys; None if it is another for some of a batch or some heads."""
    if value is None:
        return None
    others = [d for d, axes in enumerate(dims) if set(axes) & {*scores[0], *scores[1]}]
    if any(set(dims[d]) & {*scores[2], *scores[3]} for d in others):
        return None
    first = value[tuple(slice(1) if d in others else slice(None) for d in range(value.ndim))]
    if not np.array_equal(np.broadcast_to(first, value.shape), value):
        return None
    rest = tuple(dim for d, dim in enumerate(dims) if d not in others)
    array: np.ndarray = Layout.of(rest, scores[2:], (0, 1))(first.squeeze(tuple(others)))
    return array


def _window(visible: np.ndarray) -> tuple[int, int] | None:
    """The window of a mask of queries and keys, if it is a band around the diagonal."""
    rows, count = np.arange(len(visible)), visible.shape[1]
    reads_a_key = visible.any(1)
    if not reads_a_key.any():
        return None
    first, last = visible.argmax(1), count - 1 - visible[:, ::-1].argmax(1)
    left, right = (int(reach[reads_a_key].max()) for reach in (rows - first, last - rows))
    if left < 0 or right < 0:
        return None
    starts, ends = np.maximum(rows - left, 0), np.minimum(rows + right, count - 1)
    whole = (visible.sum(1) == np.maximum(ends - starts + 1, 0)) & (~reads_a_key | ((first == starts) & (last == ends)))
    return (left, right) if whole.all() else None
