"""Random keys whose numbers compile quickly: a hash of a counter instead of a cipher.

Initialisation with `threefry` or `rbg` compiles longer than the gradient of the model. These numbers are good enough
for weights and inputs of tests, and for nothing else.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import random

_STRIDE = 0x9E3779B9  # the golden ratio, so that neighbouring counters differ in many bits


def _mixed(x: jax.Array) -> jax.Array:
    """Bits that depend on all bits of `x` (the finaliser of MurmurHash3, with better constants)."""
    for multiplier, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(multiplier)
    return x ^ (x >> jnp.uint32(16))


def _counters(shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) * jnp.uint32(_STRIDE)


def _seed(seed: jax.Array) -> jax.Array:
    return jnp.asarray(seed).astype(jnp.uint32).reshape(1)


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return _mixed(key + _counters((*shape, 1)) + jnp.uint32(1))


def _fold_in(key: jax.Array, data: int) -> jax.Array:
    return _mixed(key ^ _mixed(jnp.asarray(data).astype(jnp.uint32) + jnp.uint32(_STRIDE)))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = _mixed(key.reshape((1,) * len(shape)) + _counters(shape))
    if bit_width == 64:
        return (bits.astype(jnp.uint64) << jnp.uint64(32)) | _mixed(bits).astype(jnp.uint64)
    return bits.astype(f"uint{bit_width}")


@functools.cache
def _implementation() -> Any:
    return random.define_prng_impl(
        key_shape=(1,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="hash"
    )


def key(seed: int) -> jax.Array:
    """A key like `jax.random.key(seed)`."""
    return jax.random.key(seed, impl=_implementation())
