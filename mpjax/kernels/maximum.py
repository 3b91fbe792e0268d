"""The maximum of the rows of a softmax, which XLA must not fuse with its readers.

XLA for TPUs computes a row's maximum, the differences and their exponentials in one kernel, and writes the exponentials
in float32. If the maximum is a result of its own, XLA joins it to the matmul before, and computes the exponentials
again in each kernel that reads them, from scores in half.

XLA for GPUs keeps whole rows in registers to compute all of it in one kernel, which leaves room for few warps where
rows are `long`. On other platforms this is the identity.
"""

from __future__ import annotations

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mpjax.kernels.derivatives import set_identity, set_linear

unfused = Primitive("unfused")
set_identity(unfused)
set_linear(unfused, lambda ct, x, long: [ct])
_apart = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
mlir.register_lowering(unfused, lambda ctx, x, long: _apart(ctx, x), platform="tpu")
mlir.register_lowering(unfused, lambda ctx, x, long: _apart(ctx, x) if long else [x], platform="cuda")
