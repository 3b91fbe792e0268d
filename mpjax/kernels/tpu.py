"""Two forms of operations for XLA for TPUs: a lookup that it fuses, and a maximum that it must not fuse.

A loss looks up one element of each row, its label. There, a gather reads its operand from memory. So for the labels of
a language model, XLA writes all its logits in float32, the largest array of a training step. A comparison with each
index and a sum, of which all terms but one are zero, are part of the kernel that computes the logits anyway.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


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


# A value that XLA for TPUs must not fuse with its readers: the maximum of the rows of a softmax.
#
# XLA for TPUs computes a row's maximum, the differences and their exponentials in one kernel, and writes the
# exponentials in float32. If the maximum is a result of its own, XLA joins it to the matmul before, and computes the
# exponentials again in each kernel that reads them, from scores in half. On other platforms this is the identity.

unfused = Primitive("unfused")
unfused.def_impl(lambda x: x)
unfused.def_abstract_eval(lambda x: x)
mlir.register_lowering(unfused, lambda ctx, x: [x])
mlir.register_lowering(unfused, mlir.lower_fun(lax.optimization_barrier, multiple_results=False), platform="tpu")
ad.deflinear2(unfused, lambda ct, _: [ct])
batching.primitive_batchers[unfused] = lambda args, dims: (unfused.bind(*args), dims[0])
