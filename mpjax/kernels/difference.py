"""`(x - shift) * factor`, of a batch normalization, with a derivative that reads the batch once less.

For the shift, JAX sums `g * factor` over the batch. The factor is the same in the whole sum, so this is the sum of `g`,
which the derivative of the bias is anyway, times the factor.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero, zero_from_primal

from mpjax.kernels.derivatives import same_axes


@jax.custom_jvp
def scaled_difference(x: Any, shift: Any, factor: Any, difference: Any) -> Any:
    """`(x - shift) * factor`.

    Args:
        x: float32[...].
        shift, factor: float32 arrays of one shape, whose sizes are those of `x` or 1.
        difference: `x - shift`, which others may read too; its tangent is that of the others.
    """
    return lax.mul(difference, factor)


def _jvp(primals: Any, tangents: Any) -> Any:
    (_, _, factor, difference), (dx, dshift, dfactor, _) = primals, tangents
    is_zero = [type(tangent) is SymbolicZero for tangent in tangents[:3]]
    out = scaled_difference(*primals)
    if all(is_zero):
        return out, zero_from_primal(out, symbolic_zeros=True)
    total = lax.full_like(out, 0) if is_zero[0] else lax.mul(*same_axes((dx, factor)))
    if not is_zero[2]:
        total = lax.add(*same_axes((total, lax.mul(*same_axes((difference, dfactor))))))
    if not is_zero[1]:
        # Not subtracted: the derivative of a sum sums `g`, as the bias's does, and not `-g`.
        total = lax.add(*same_axes((total, lax.neg(lax.mul(*same_axes((dshift, factor)))))))
    return out, total


scaled_difference.defjvp(_jvp, symbolic_zeros=True)
