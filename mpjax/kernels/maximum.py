"""The maximum of the rows of a softmax, which XLA must not fuse with its readers.

XLA for TPUs computes a row's maximum, the differences and their exponentials in one kernel, and writes the exponentials
in float32. If the maximum is a result of its own, XLA joins it to the matmul before, and computes the exponentials
again in each kernel that reads them, from scores in half.

XLA for GPUs keeps whole rows in registers to compute all of it in one kernel, which leaves room for few warps where
rows are `long`. On other platforms this is the identity.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

unfused = Primitive("unfused")
unfused.def_impl(lambda x, long: x)
unfused.def_abstract_eval(lambda x, long: x)
ad.deflinear2(unfused, lambda ct, _, long: [ct])
batching.primitive_batchers[unfused] = lambda args, dims, long: (unfused.bind(*args, long=long), dims[0])

_apart = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)


def _lower(ctx: Any, x: Any, long: bool) -> Any:
    return [x]


def _lower_for_gpu(ctx: Any, x: Any, long: bool) -> Any:
    return _apart(ctx, x) if long else [x]


mlir.register_lowering(unfused, _lower)
mlir.register_lowering(unfused, lambda ctx, x, long: _apart(ctx, x), platform="tpu")
mlir.register_lowering(unfused, _lower_for_gpu, platform="cuda")
