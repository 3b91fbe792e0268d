"""Rounding of float32 to narrower floats, to nearest or stochastically, by integer operations that XLA fuses.

A plain cast also rounds, but XLA may remove a cast to half and back ("excess precision"). The rounding error, which
Kahan summation needs, would then be computed as zero. XLA can't remove these operations.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MANTISSA_BITS = 23  # of float32, like the next two constants
_MIN_EXPONENT = -126
_SIGN = np.uint32(1 << 31)


# Inlined when a step is traced, and a single program when an optimizer is initialised outside `jit`.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def random_bits(words: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for each element, from two random words for the array.

    The bits are a hash of the element's index, keyed by the words. XLA fuses it into its consumers, and each device
    computes the bits of its own shard. `jax.random.bits` costs 70 times as much on a CPU, several times an Adam update.

    Args:
        words: Array of shape (2,), uint32, new for each array and each step.
        shape: Shape of the result. Only elements 2³² apart share their bits.

    Returns:
        uint32 array.

    Source: `triple32` of Chris Wellons, "Prospecting for Hash Functions"
    (https://nullprogram.com/blog/2018/07/31), with the words mixed in before its first and its second round.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return mixed(index, words)


def mixed(x: jax.Array, words: Any) -> jax.Array:
    """A hash of each element of a uint32 array, keyed by two words, as in `random_bits`."""
    x = x + words[0]
    x = (x ^ x >> np.uint32(17)) * np.uint32(0xED5AD4BB)
    x = (x ^ x >> np.uint32(11) ^ words[1]) * np.uint32(0xAC4C1B51)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x31848BAB)
    return x ^ x >> np.uint32(14)


def fraction(bits: jax.Array) -> jax.Array:
    """Random numbers from 0 to less than 1, float32, from random bits."""
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def integers(x: jax.Array, bits: jax.Array) -> jax.Array:
    """Rounds float32 up or down to an integer at random, so that the mean is `x`. Integers are unchanged."""
    below = jnp.floor(x)
    return below + (fraction(bits) < x - below).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def round_stochastically(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
    """Rounds up or down at random so that the mean of the result is `x`.

    A value between two neighbours of `dtype`, `f` of the way up, becomes the upper one with probability `f` (exact for
    normal numbers, to 2⁻²⁴ for subnormal ones). Numbers representable in `dtype`, infinities and NaN are unchanged. A
    number that rounding to nearest keeps finite stays finite.

    Args:
        x: float32 array.
        dtype: float16, bfloat16 or a float8 with infinities or NaN.
        bits: Random bits, a uint32 array of `x`'s shape.

    Returns:
        Array of `dtype`.
    """
    low = bits & np.uint32((1 << _dropped(dtype)) - 1)
    return _rounded(x, dtype, lambda _: low, lambda y: integers(y, bits))


@functools.partial(jax.jit, static_argnums=1, inline=True)
def round_to_nearest(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 to the nearest number of `dtype`, ties to even: a cast that XLA can't remove.

    Args:
        x: float32 array.
        dtype: float16, bfloat16 or a float8 with infinities or NaN.

    Returns:
        Array of `dtype`.
    """
    dropped = _dropped(dtype)

    def noise(magnitude: jax.Array) -> jax.Array:
        odd = magnitude >> np.uint32(dropped) & np.uint32(1)
        return odd + np.uint32((1 << (dropped - 1)) - 1)

    return _rounded(x, dtype, noise, lambda y: jax.lax.round(y, jax.lax.RoundingMethod.TO_NEAREST_EVEN))


def _dropped(dtype: Any) -> int:
    """The number of bits of float32's mantissa that `dtype` lacks."""
    return _MANTISSA_BITS - int(jnp.finfo(dtype).nmant)


def _rounded(x: jax.Array, dtype: Any, noise: Any, round_subnormal: Any) -> jax.Array:
    info, dropped = jnp.finfo(dtype), _dropped(dtype)
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = word & ~_SIGN
    # Add noise to the bits that are dropped, then truncate. A carry correctly propagates into the exponent.
    kept = magnitude + noise(magnitude) & ~np.uint32((1 << dropped) - 1)
    rounded = jax.lax.bitcast_convert_type(kept, jnp.float32)
    if info.minexp > _MIN_EXPONENT:  # Its subnormal numbers are normal in float32, and evenly spaced.
        spacing = 2.0 ** (int(info.minexp) - int(info.nmant))
        size = jnp.abs(x)
        below = round_subnormal(size * np.float32(1 / spacing)) * np.float32(spacing)
        rounded = jnp.where(size < np.float32(2.0 ** int(info.minexp)), below, rounded)
    rounded = jax.lax.bitcast_convert_type(
        jax.lax.bitcast_convert_type(rounded, jnp.uint32) | word & _SIGN, jnp.float32
    ).astype(dtype)
    plain = x.astype(dtype)
    # Noise could turn a NaN into a number, and the largest finite numbers into infinity.
    return jnp.where(jnp.isfinite(rounded) & jnp.isfinite(x), rounded, plain)
