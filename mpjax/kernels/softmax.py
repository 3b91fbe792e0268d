"""A softmax that is divided after its product with values: `(e V) / sum(e)`, for `e = exp(x)`.

A row of the result is shorter than one of probabilities, and the sum and what the matmul reads come from one pass over
the scores. The derivative is that of `(e / sum(e)) V`: `e (de - sum(e * de) / sum(e))`, where `de` is the product of
the divided cotangent and the values. It follows from `e` in half, which the matmul keeps, so that no score is kept.

`sum(e * de) / sum(e)` cancels most of `de` where one score of a row outweighs the others, or where all values are
alike. So both read the same rounded `de`, and the sum is that of the rounded `e`. (FlashAttention takes that term from
the result, `sum(dout * out)`, which is cheaper. There, `de` isn't rounded. Here, gradients would have 2.5 times the
error in such rows.)
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.kernels import weight_gradients


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
class Average:
    """A product of exponentials and values over the sums of the exponentials.

    Args:
        side: Which operand of the product the exponentials are.
        params: The other parameters of the product.
        layout: Brings the sums into the axes of the product.
    """

    side: int
    params: tuple[tuple[str, Any], ...]
    layout: Any  # sums → sums

    floats = (2,)
    kind = "allow: divided by the sums of its softmax afterwards"

    def __call__(self, halves: tuple[Any, Any], operands: tuple[Any, Any], sums: Any) -> Any:
        """The average of the values for each row, in float32.

        Args:
            halves: The exponentials and the values, in half, in the order of the product.
            operands: The same; a parameter in float32.
            sums: The sums, float32.
        """
        params = {**dict(self.params), "preferred_element_type": np.dtype(np.float32)}
        return weight_gradients.matmul(lax.dot_general_p, params, halves, operands, True) / self.layout(sums)
