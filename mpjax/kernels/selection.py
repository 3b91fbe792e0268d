"""One element of each row, as a loss looks up its labels, in a form that XLA for TPUs fuses.

There, a gather reads its operand from memory. So for the labels of a language model, XLA writes all its logits in
float32, the largest array of a training step. A comparison with each index and a sum, of which all terms but one are
zero, are part of the kernel that computes the logits anyway.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


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
    """The elements that a gather selects, by comparison.

    Args:
        x, indices: The operands of the gather.
        params: Its parameters, for which `selects` holds.
    """
    (axis,) = params["dimension_numbers"].start_index_map
    last, at = x.shape[axis] - 1, jnp.squeeze(indices, -1)
    inside = (at >= 0) & (at <= last)
    if params["mode"] == lax.GatherScatterMode.CLIP:
        at, inside = jnp.clip(at, 0, last), True
    elements = jnp.where(lax.broadcasted_iota(np.int32, x.shape, axis) == at, x, 0)
    fill = np.nan if params["fill_value"] is None else params["fill_value"]
    return jnp.where(inside, jnp.sum(elements, axis, keepdims=True), fill)
