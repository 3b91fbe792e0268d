"""Random keys that compile quickly: a hash of a counter instead of a cipher.

Initialisation with `threefry` or `rbg` takes longer to compile than the gradient of the model. These random numbers are
good enough only for weights and inputs of tests.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import random

_STRIDE = 0x9E3779B9  # the golden ratio, so that neighbouring counters differ in many bits


def _mixed(x: Any) -> Any:
    """Bits that depend on all bits of `x` (the finaliser of MurmurHash3, with better constants)."""
    for multiplier, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(multiplier)
    return x ^ (x >> np.uint32(16))


# Each function takes a key as a NumPy or JAX uint32 array of shape (1,), and returns an array of the same library.


def split(key: Any, shape: tuple[int, ...], counters: Any = np.arange) -> Any:
    """New keys as numbers, in an array of this shape."""
    return _mixed(key.reshape((1,) * len(shape)) + _counters(shape, counters) + np.uint32(1))


def fold_in(key: Any, data: Any) -> Any:
    """New keys as numbers; `data` has dtype uint32."""
    return _mixed(key ^ _mixed(data + np.uint32(_STRIDE)))


def random_bits(key: Any, bit_width: int, shape: tuple[int, ...], counters: Any = np.arange) -> Any:
    """Random integers of `bit_width` bits."""
    bits = _mixed(key.reshape((1,) * len(shape)) + _counters(shape, counters))
    if bit_width == 64:
        return (bits.astype(np.uint64) << np.uint64(32)) | _mixed(bits).astype(np.uint64)
    return bits.astype(f"uint{bit_width}")


def _counters(shape: tuple[int, ...], counters: Any) -> Any:
    return counters(math.prod(shape), dtype=np.uint32).reshape(shape) * np.uint32(_STRIDE)


def _iota(size: int, dtype: Any) -> jax.Array:
    return jax.lax.iota(dtype, size)


@functools.cache
def _implementation() -> Any:
    return random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.asarray(seed).astype(jnp.uint32).reshape(1),
        split=lambda key, shape: split(key, shape, _iota)[..., None],
        random_bits=lambda key, bit_width, shape: random_bits(key, bit_width, shape, _iota),
        fold_in=lambda key, data: fold_in(key, jnp.asarray(data).astype(jnp.uint32)),
        name="hash",
    )


def key(seed: int) -> jax.Array:
    """A key like `jax.random.key(seed)`."""
    return jax.random.key(seed, impl=_implementation())


def make_default(patch: Any) -> None:
    """Makes `jax.random.key` return such keys unless an implementation is given.

    Args:
        patch: A `pytest.MonkeyPatch`.
    """
    real = jax.random.key
    patch.setattr(jax.random, "key", lambda seed, *, impl=None: real(seed, impl=impl or _implementation()))


@functools.cache
def dtype() -> Any:
    """The dtype of an array of keys."""
    return key(0).dtype


def numbers(keys: jax.Array) -> np.ndarray[Any, Any]:
    """An array of keys as uint32."""
    return np.asarray(jax.random.key_data(keys))[..., 0]


def keys(numbers: np.ndarray[Any, Any]) -> jax.Array:
    """The keys with these numbers."""
    return jax.random.wrap_key_data(jnp.asarray(numbers[..., None], jnp.uint32), impl=_implementation())
