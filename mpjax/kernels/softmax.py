"""A softmax that is divided after its product with values: `(e V) / sum(e)`, for `e = exp(x)`.

A row of the result is shorter than one of probabilities, and the sum and what the matmul reads come from one pass over
the scores. The derivative is that of `(e / sum(e)) V`: `e (de - sum(e * de) / sum(e))`, where `de` is the product of
the divided cotangent and the values. It follows from `e` in half, which the matmul keeps, so that no score is kept.

`sum(e * de) / sum(e)` cancels most of `de` where one score of a row outweighs the others, or where all values are
alike. Rounded apart, `de` and that term would give such rows 2.5 times the error. So where nothing but moves is between
the exponentials and the product, the matmul subtracts it: with `dout` the divided cotangent, in half, that term is
`sum(dout * out)`, as in FlashAttention, and `de` less that term is `[dout, -high, -low] [V, 1, 1]^T`, where `high` and
`low` are the term in two half numbers. What the matmul rounds is the difference, and no pass over the scores computes a
sum. Elsewhere (a dropout) both read the same rounded `de`, and the sum is that of the rounded `e`.

What is left is one product in half, `e` times that difference, which XLA for GPUs computes in the matmul's kernel. A
scale and masks after it would be a kernel of their own, so the scores receive it as it is: the scale is in the divided
cotangent, the `e` of a hidden score is 0, and where a whole row is hidden, the cotangent is divided by infinity.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from mpjax.kernels import weight_gradients
from mpjax.kernels.derivatives import in_front, set_derivative, set_identity, set_linear


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: Any, half: Any) -> jax.Array:
    """float32 with the numbers of half. XLA may remove a cast to half and back, but not this."""
    info = jnp.finfo(half)
    y = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp <= jnp.finfo(x.dtype).minexp:
        return y
    # `reduce_precision` flushes the subnormal numbers of float16, which are evenly spaced.
    spacing = np.float32(2.0 ** int(info.minexp - info.nmant))
    below = lax.round(x / spacing, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
    return jnp.where(jnp.abs(x) < np.float32(2.0 ** int(info.minexp)), below, y)


_rounded.defjvp(lambda half, primals, tangents: (_rounded(*primals, half), tangents[0]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def exponentials(x: Any, axes: tuple[int, ...], half: Any) -> tuple[Any, Any]:
    """The exponentials of float32 numbers, in half, and their sums, for a division by these alone.

    The derivative of the first is that of their quotient, times the sums. That of the second is 0.

    Args:
        x: Array, float32: scores less their maximum.
        axes: The axes to sum over.
        half: The half dtype.

    Returns:
        The exponentials in half, of the shape of `x`, and their sums in float32, without the axes.
    """
    e = _rounded(jnp.exp(x), half)
    return lax.convert_element_type(e, half), jnp.sum(e, axes)


@exponentials.defjvp
def _exponentials_jvp(axes: tuple[int, ...], half: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    low, sums = exponentials(*primals, axes, half)
    low = lax.optimization_barrier(low)  # Without it, XLA would keep them in float32 too, for the backward pass.

    def tangent(low: Any, sums: Any, dx: Any) -> Any:
        e = lax.convert_element_type(low, dx.dtype)
        mean = jnp.sum(e * dx, axes) / sums
        return lax.convert_element_type(e * (dx - jnp.expand_dims(mean, axes)), half)

    # Without it, JAX would keep them in float32.
    de = jax.checkpoint(tangent, prevent_cse=False)(low, sums, *tangents)
    return (low, sums), (de, jnp.zeros_like(sums))


@dataclasses.dataclass(frozen=True)
class Centred:
    """The exponentials of scores for an `Average` that subtracts the mean of their derivative.

    Args:
        axes: The axes to sum over.
        half: The half dtype.
        factor: By how much the scores were multiplied.
        number: The number, far below all scores, that masks selected in place of some; None without masks.
    """

    axes: tuple[int, ...]
    half: Any
    factor: float = 1.0
    number: float | None = None

    def __call__(self, x: Any, scores: Any, top: Any) -> tuple[Any, Any, Any]:
        """The exponentials in half, their sums, and by what the derivative of their average is divided, in float32.

        Args:
            x: Array, float32: the scores after their scale and masks.
            scores: Array, float32: the scores before these, which receive the derivative.
            top: The maximum of each row of `x`, with axes of size 1 or broadcast.
        """
        top = lax.stop_gradient(top)  # What is subtracted from all scores of a row changes no average.
        low, sums = _centred_exponentials(self.axes, self.half, self.factor, lax.stop_gradient(x) - top, scores)
        divisor = sums / np.float32(self.factor)
        if self.number is not None:
            # Elsewhere, the exponential of a hidden score is 0.
            for axis in self.axes:
                top = lax.slice_in_dim(top, 0, 1, axis=axis)
            divisor = jnp.where(lax.squeeze(top, self.axes) > np.float32(self.number) + 256, divisor, jnp.inf)
        return low, sums, divisor


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _centred_exponentials(axes: tuple[int, ...], half: Any, factor: float, x: Any, scores: Any) -> tuple[Any, Any]:
    return exponentials(x, axes, half)


@_centred_exponentials.defjvp
def _centred_exponentials_jvp(
    axes: tuple[int, ...], half: Any, factor: float, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    low, sums = _scaled_exponentials(axes, half, factor, *primals)
    low, ds = lax.optimization_barrier(low), tangents[1]
    # A product in half alone, which XLA for GPUs computes in the kernel of the matmul. The factor is in the divisor.
    de = low * lax.convert_element_type(ds, half)
    return (low, sums), (de, jnp.zeros_like(sums))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _scaled_exponentials(axes: tuple[int, ...], half: Any, factor: float, x: Any, scores: Any) -> tuple[Any, Any]:
    """The same for second derivatives, which read the exponentials themselves: their derivative has the factor."""
    return exponentials(x, axes, half)


@_scaled_exponentials.defjvp
def _scaled_exponentials_jvp(
    axes: tuple[int, ...], half: Any, factor: float, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    low, sums = _scaled_exponentials(axes, half, factor, *primals)
    de = np.float32(factor) * lax.convert_element_type(low, np.float32) * tangents[1]
    return (low, sums), (lax.convert_element_type(de, half), jnp.sum(de, axes))


@dataclasses.dataclass(frozen=True)
class Average:
    """A product of exponentials and values over the sums of the exponentials.

    Args:
        side: Which operand of the product the exponentials are.
        params: The other parameters of the product.
        layout: Brings the sums into the axes of the product.
        width: The dimension of the values, and that of the product, that only these have, if the exponentials are
            `Centred`: then the derivative for them is less its mean.
    """

    side: int
    params: tuple[tuple[str, Any], ...]
    layout: Any  # sums → sums
    width: tuple[int, int] | None = None

    @property
    def floats(self) -> tuple[int, ...]:
        """The operands that stay float32: the sums, and the divisors."""
        return (2,) if self.width is None else (2, 3)

    kind = "allow: divided by the sums of its softmax afterwards"

    def __call__(self, halves: tuple[Any, Any], operands: tuple[Any, Any], sums: Any, divisor: Any = None) -> Any:
        """The average of the values for each row, in float32.

        Args:
            halves: The exponentials and the values, in half, in the order of the product.
            operands: The same; a parameter in float32.
            sums: The sums, float32.
            divisor: By what the derivative for the exponentials is divided, float32, if they are `Centred`.
        """
        if self.width is None:
            return self.average(halves, operands, sums)
        return _centred(self, halves, operands, sums, divisor)

    def average(self, halves: Any, operands: Any, sums: Any) -> Any:
        """The same, with the derivative of the operations that it is made of."""
        return weight_gradients.matmul(lax.dot_general_p, self._params, halves, operands, True) / self.layout(sums)

    @property
    def _params(self) -> dict[str, Any]:
        return {**dict(self.params), "preferred_element_type": np.dtype(np.float32)}

    def tangent(self, de: Any, values: Any, out: Any, divisor: Any) -> Any:
        """The derivative for the exponentials: `(de V - sum(de) out) / divisor`, whose transpose is one matmul."""
        assert self.width is not None
        dim, at = self.width
        size, half = values.shape[dim], values.dtype
        ones = jnp.ones_like(lax.slice_in_dim(values, 0, 1, axis=dim))
        wide = jnp.concatenate([values, ones, ones, *[jnp.zeros_like(ones)] * 6], dim)  # kernels read 8 at once
        pair = (de, wide) if self.side == 0 else (wide, de)
        both = weight_gradients.tangent.bind(*pair, matmul=lax.dot_general_p, half=half, wide=False, **self._params)
        ends = (0, size), (size, size + 1), (size + 1, size + 2)
        product, high, low = (lax.slice_in_dim(both, start, end, axis=at) for start, end in ends)
        difference = product - _in_two.bind(high, low, half=half) * out
        return _rounded_back.bind(difference, half=half) / self.layout(divisor)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _centred(options: Average, halves: Any, operands: Any, sums: Any, divisor: Any) -> Any:
    return options.average(halves, operands, sums)


@_centred.defjvp
def _centred_jvp(options: Average, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (halves, operands, sums, divisor), (of_halves, of_operands, *_) = primals, tangents
    which = 1 - options.side

    def of_values(half: Any, operand: Any) -> Any:
        pairs = [list(halves), list(operands)]
        pairs[0][which], pairs[1][which] = half, operand
        return options.average(pairs[0], pairs[1], sums)

    out, for_values = jax.jvp(of_values, (halves[which], operands[which]), (of_halves[which], of_operands[which]))
    # The exponentials are half as operands, too, and the derivative of a matmul is for its operands.
    # Without the checkpoint, JAX would keep the longer values.
    of_exponentials = jax.checkpoint(options.tangent, prevent_cse=False)
    return out, for_values + of_exponentials(of_operands[options.side], halves[which], out, divisor)


# Identities. The first rounds the cotangent, so that all that read it read the same; of the second's operands,
# which are equal, one has the cotangent's half number, and the other one what that lacks.
_rounded_back = Primitive("rounded_back")
_in_two = Primitive("in_two")


def _in_two_transpose(ct: Any, *operands: Any, half: Any) -> Any:
    high = _rounded(ct, half)
    return [high, ct - high]


def _in_two_tangent(primals: Any, tangents: Any, out: Any, params: Any) -> Any:
    return _in_two.bind(*map(ad.instantiate_zeros, tangents), **params)


set_identity(_rounded_back, in_front(_rounded_back))
set_linear(_rounded_back, lambda ct, x, half: [_rounded(ct, half)])
set_identity(_in_two, in_front(_in_two))
set_derivative(_in_two, _in_two_tangent, None, _in_two_transpose)

# The identity on the maximum of the rows of a softmax, which XLA must not fuse with its readers.
#
# XLA for TPUs computes a row's maximum, the differences and their exponentials in one kernel, and writes the
# exponentials in float32. If the maximum is a result of its own, XLA joins it to the matmul before, and computes the
# exponentials again in each kernel that reads them, from scores in half. XLA for GPUs keeps whole rows in registers to
# compute all of it in one kernel, which leaves room for few warps where rows are `long`.
unfused = Primitive("unfused")
set_identity(unfused)
set_linear(unfused, lambda ct, x, long: [ct])
_apart = mlir.lower_fun(lax.optimization_barrier, multiple_results=False)
mlir.register_lowering(unfused, lambda ctx, x, long: _apart(ctx, x), platform="tpu")
mlir.register_lowering(unfused, lambda ctx, x, long: _apart(ctx, x) if long else [x], platform="cuda")
