"""cuDNN's matmul of block-scaled matrices, and how XLA splits it over devices.

JAX's own `jax.nn.scaled_matmul` takes scales in eight bits. Where XLA must send these between devices, it may do so by
a sum, for which NCCL has no such dtype. Here scales are float32 until the matmul reads them.
"""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

_EXPONENTS = np.dtype(jnp.float8_e8m0fnu)  # a dtype of powers of two
_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
Axes = Any  # of one dimension: a name, several, or None


def block_dot(a: Any, b: Any, of_a: Any, of_b: Any, result: np.dtype) -> Any:
    """The product of block-scaled matrices.

    Args:
        a, b: float8 elements, shapes (batch, m, k) and (batch, n, k).
        of_a, of_b: Their scales, float32 powers of two, shapes (batch, m, k/32) and (batch, n, k/32).
        result: The dtype of the result.

    Returns:
        Shape (batch, m, n).
    """
    return _partitioned(a, b, of_a, of_b, result)


def _local(a: Any, b: Any, of_a: Any, of_b: Any, result: np.dtype) -> Any:
    batch = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0], "dequantize_type": _TYPES[result.name]}
    call = jax.ffi.ffi_call(
        "__op$block_scaled_dot",
        jax.ShapeDtypeStruct((*a.shape[:2], b.shape[1]), result),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"scaled_dot_backend_config": batch}),
    )
    return call(a, b, of_a.astype(_EXPONENTS), of_b.astype(_EXPONENTS))


_partitioned = custom_partitioning(_local, static_argnums=(4,))


def _axes(x: Any) -> tuple[Axes, Axes, Axes]:
    """The mesh axes over which each dimension is split."""
    spec: tuple[Axes, ...] = tuple(getattr(x.sharding, "spec", ()))
    batch, rows, contracted, *_ = *spec, None, None, None
    return batch, rows, contracted


def _names(*axes: Axes) -> set[str]:
    return {name for each in axes if each is not None for name in (each if isinstance(each, tuple) else (each,))}


def _result_sharding(result: np.dtype, mesh: Any, operands: Any, out: Any) -> NamedSharding:
    (batch, m, _), (_, n, _) = map(_axes, operands[:2])
    return NamedSharding(mesh, PartitionSpec(batch, m, None if _names(n) & _names(batch, m) else n))


def _partition(result: np.dtype, mesh: Any, operands: Any, out: Any) -> Any:
    """The local function, and the shardings of the result and of the operands.

    Rows are split as in the result. If both operands are split along the contraction, in whole blocks, the products of
    the parts are added across devices, or scattered where the result is split by the same axes.
    """
    (_, _, k), (_, _, other), (batch, m, n) = (_axes(x) for x in (*operands[:2], out))
    blocks = operands[2].shape[2]
    if k != other or k is None or blocks % math.prod(mesh.shape[name] for name in _names(k)):
        k = None
    scattered = next((d for d, axes in ((1, m), (2, n)) if k is not None and axes == k), None)
    m, n = (None if scattered == d else axes for d, axes in ((1, m), (2, n)))
    if scattered is None and _names(k) & _names(batch, m, n):
        k = None

    def product(a: Any, b: Any, of_a: Any, of_b: Any) -> Any:
        part = _local(a, b, of_a, of_b, result)
        if scattered is not None:
            return lax.psum_scatter(part, k, scatter_dimension=scattered, tiled=True)
        return part if k is None else lax.psum(part, k)

    rows = [NamedSharding(mesh, PartitionSpec(batch, axes, k)) for axes in (m, n)]
    return mesh, product, out.sharding, (*rows, *rows)


PARTITIONING = {
    "infer_sharding_from_operands": _result_sharding,
    "partition": _partition,
    "sharding_rule": "b m k, b n k, b m k, b n k -> b m n",
}
_partitioned.def_partition(**PARTITIONING)
