"""FLOPs of matmuls and convolutions."""

from __future__ import annotations

import math
from typing import Any

from mpjax.program.primitives import MATMULS


def matmul_flops(eqn: Any) -> int:
    """FLOPs of one matmul or convolution, where a multiply-add counts as two; 0 for any other operation."""
    name = eqn.primitive.name
    if name not in MATMULS:
        return 0
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(lhs.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        return 2 * _conv_multiplications(eqn)
    if name == "fused_attention":  # Two matmuls: the operands are queries, keys and values.
        options = eqn.params["options"]
        return 2 * options.scores * (options.ins[0].merged[-1] + options.out.merged[-1])
    # A ragged dot multiplies each row by the matrix of its group.
    return 2 * math.prod(lhs.shape) * rhs.shape[-1]


def is_weight_gradient(eqn: Any) -> bool:
    """Whether a convolution is JAX's weight gradient, which has the inputs' channels in place of the batch."""
    return eqn.params["dimension_numbers"].lhs_spec[0] != 0


def _conv_multiplications(eqn: Any) -> int:
    """Multiplications of a convolution, counted by output, or by input where that gives fewer.

    The count by input is smaller for a transposed convolution, including the gradient by the input. The other
    multiplications are by padding and by the zeros that the stride inserts between the inputs. So a gradient has the
    same count as its convolution.
    """
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    out, numbers = eqn.outvars[0].aval.shape, eqn.params["dimension_numbers"]
    features, inner = (max(rhs[d], 1) for d in numbers.rhs_spec[:2])
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    of_outputs = math.prod(out) * math.prod(rhs) // features
    if is_weight_gradient(eqn):
        return of_outputs
    return min(of_outputs, math.prod(lhs) * math.prod(rhs) // (inner * groups))
