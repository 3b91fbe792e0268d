"""The element of each row that a loss looks up, its label, by comparison.

The derivative of a gather is a scatter. XLA fuses neither with the kernels that compute the logits or their gradient:
for the labels of a language model it writes an array of tokens × vocabulary in float32, the largest of a training step.
A comparison of each index with the label fuses. On a GPU the lookup stays a gather, and its derivative compares. XLA
for TPUs reads the operand of a gather from memory, so there a sum of the compared elements, of which all but one are
zero, takes the place of the gather as well.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from mpjax.kernels import derivatives
from mpjax.program import compat


def selects(indices: Any, params: dict[str, Any]) -> bool:
    """Whether a gather selects one element of each row along one axis.

    Args:
        indices: The second operand of the gather.
        params: Its parameters.
    """
    dimensions, sizes = params["dimension_numbers"], params["slice_sizes"]
    if len(dimensions.start_index_map) != 1 or indices.dtype != np.int32 or any(size != 1 for size in sizes):
        return False
    (axis,) = dimensions.start_index_map
    others = tuple(i for i in range(len(sizes)) if i != axis)
    rows = dimensions.operand_batching_dims == dimensions.start_indices_batching_dims == others
    return rows and indices.ndim == len(sizes) + 1 and indices.shape[axis] == 1


def select(x: Any, indices: Any, params: dict[str, Any]) -> Any:
    """The elements that a gather selects.

    Args:
        x, indices: The operands of the gather.
        params: Its parameters, for which `selects` holds.
    """
    (axis,) = params["dimension_numbers"].start_index_map
    last, at = x.shape[axis] - 1, jnp.squeeze(indices, -1)
    inside = (at >= 0) & (at <= last)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        at, inside = jnp.clip(at, 0, last), True
    if compat.platform() == "tpu" or compat.is_explicit(jax.typeof(x)):
        elements = jnp.sum(_compared(x, at, axis), axis, keepdims=True)
    else:
        x, at = derivatives.same_axes([x, jnp.clip(at, 0, last)])
        elements = element.bind(x, at, axis=axis - x.ndim)
    fill = np.nan if params["fill_value"] is None else params["fill_value"]
    return jnp.where(inside, elements, fill)


def _compared(x: Any, at: Any, axis: int, shape: tuple[int, ...] | None = None) -> Any:
    """The array with zeros in place of all elements but one in each row."""
    return jnp.where(lax.broadcasted_iota(np.int32, shape or x.shape, axis) == at, x, 0)


# `x, at → take_along_axis(x, at, axis)`, of a row's one index, within bounds; the axis is counted from the last one.
element = Primitive("element")


def _transpose(ct: Any, x: Any, at: Any, axis: int) -> list[Any]:
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval), None]
    shape = x.aval.shape
    return [_compared(ct, at, len(shape) + axis, shape), None]


derivatives.define(
    element,
    lambda x, at, axis: jnp.take_along_axis(x, at, axis, mode="promise_in_bounds"),
    lambda x, at, axis: x.update(shape=at.shape, weak_type=False),
)
derivatives.set_linear(element, _transpose)
