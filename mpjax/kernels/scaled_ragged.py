"""Ragged matmuls of float8 operands (a mixture of experts), with one scale for each tensor, and their gradients.

The forward pass is JAX's `ragged_dot_general` of float8 operands, times the product of their scales; so is each matmul
of the gradient, by JAX's transpose rule. The backward pass quantises the operands, kept as they are stored, again.
Tangents and second derivatives run in half, as does the `vmap` of a derivative.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad

from mpjax.kernels import weight_gradients
from mpjax.kernels.scaled_matmul import Operand, quantised, rescale
from mpjax.program import compat
from mpjax.program.compat import ragged_dot_general_p
from mpjax.program.formats import E4M3

_PRECISE = lax.Precision.HIGHEST  # As in `scaled_matmul`, backward matmuls accumulate all bits.


def multiply(
    params: dict[str, Any],
    operands: Sequence[Operand],
    half: np.dtype,
    sizes: Any,
    *,
    cotangents: np.dtype,
    half_gradients: bool = False,
    axes: tuple[str, ...] = (),
    backward: bool = False,
    **of_dense: Any,
) -> Any:
    """The ragged matmul of two quantised operands.

    Args:
        params: The parameters of a `ragged_dot_general`.
        operands: Its operands.
        half: The dtype of its result.
        sizes: The sizes of its groups.
        cotangents, half_gradients, axes, backward: As in `scaled_matmul.matmul`.
        of_dense: What only dense matmuls depend on.
    """
    params = {**params, "preferred_element_type": half, "precision": _PRECISE if backward else None}
    out = _scaled(lambda a, b: ragged_dot_general_p.bind(a, b, sizes, **params), *operands)
    stored = compat.vary_like(out, [x.x for x in operands])
    how = _Ragged(cotangents, half_gradients, axes)
    return weight_gradients.result.bind(out, *stored, sizes, matmul=how, half=half, wide=True, **params)


def _scaled(fun: Any, a: Operand, b: Operand) -> Any:
    """A bilinear function of two arrays, computed from their copies."""
    qa, qb = (compat.vary_like(q, [p])[0] for q, p in ((b.q, a.q), (a.q, b.q)))
    return rescale.bind(fun(qa, qb), a.scale * b.scale)


@dataclasses.dataclass(frozen=True)
class _Ragged:
    """`ragged_dot_general` for `weight_gradients.result`, with another transpose rule."""

    cotangents: np.dtype
    half_gradients: bool
    axes: tuple[str, ...]

    name: ClassVar[str] = ragged_dot_general_p.name
    bind: ClassVar[Any] = staticmethod(ragged_dot_general_p.bind)
    abstract_eval: ClassVar[Any] = staticmethod(ragged_dot_general_p.abstract_eval)

    def transpose(self, ct: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        """The cotangents of the operands, of which one is an undefined primal."""
        which = 0 if ad.is_undefined_primal(operands[0]) else 1
        unknown, other, sizes = operands[which], operands[1 - which], operands[2]

        def in_half(ct: Any, other: Any, sizes: Any, **options: Any) -> Any:
            pair = (unknown, other)[:: 1 - 2 * which]
            return ad.primitive_transposes[ragged_dot_general_p](ct, *pair, sizes, **{**params, **options})[which]

        @jax.custom_jvp
        def gradient(ct: Any, other: Any, sizes: Any) -> Any:
            copies = quantised(ct, self.cotangents, self.axes), quantised(other, E4M3, self.axes)
            return _scaled(lambda ct, other: in_half(ct, other, sizes, precision=_PRECISE), *copies)

        @gradient.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            pair, sizes = primals[:2], primals[2]
            return gradient(*primals), jax.jvp(lambda ct, other: in_half(ct, other, sizes), pair, tangents[:2])[1]

        fun: Any = in_half if self.half_gradients and unknown.aval.dtype == np.float32 else gradient
        found = fun(ct, other, sizes)
        return [found if i == which else None for i in range(2)]
