"""A value that XLA for TPUs must not fuse with its readers: the maximum of the rows of a softmax.

XLA for TPUs computes a row's maximum, the differences and their exponentials in one kernel, and writes the exponentials
in float32. If the maximum is a result of its own, XLA joins it to the matmul before, and computes the exponentials
again in each kernel that reads them, from scores in half. On other platforms this is the identity.
"""

from __future__ import annotations

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

unfused = Primitive("unfused")
unfused.def_impl(lambda x: x)
unfused.def_abstract_eval(lambda x: x)
mlir.register_lowering(unfused, lambda ctx, x: [x])
mlir.register_lowering(unfused, mlir.lower_fun(lax.optimization_barrier, multiple_results=False), platform="tpu")
ad.deflinear2(unfused, lambda ct, _: [ct])
batching.primitive_batchers[unfused] = lambda args, dims: (unfused.bind(*args), dims[0])
