"""Checksums of a state's arrays, computed where the arrays are. Orbax stores none, so it restores a flipped bit."""

from __future__ import annotations

import json
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

_GOLDEN = 0x9E3779B1  # consecutive multiples of it are spread over all 32-bit numbers (Knuth)


@partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling takes longer than running
def _checksums(arrays: list[jax.Array]) -> list[jax.Array]:
    return [_checksum(x) for x in arrays]


def _checksum(x: jax.Array) -> jax.Array:
    """The sum of the array's words, each times an odd number of its own, modulo 2**32.

    An odd factor keeps every bit: any change of a single word changes the sum.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # row-major, without a reshape that would gather a sharded array
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(words * (index * jnp.uint32(_GOLDEN) | jnp.uint32(1)), dtype=jnp.uint32)


def record(state: Any, position: dict[str, Any]) -> dict[str, Any]:
    """What is stored beside a state: the position, and checksums of both."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sums = jax.device_get(_checksums([x for _, x in leaves]))
    arrays = {jax.tree_util.keystr(path): int(x) for (path, _), x in zip(leaves, sums, strict=True)}
    return {"position": position, "position_checksum": _text_checksum(position), "array_checksums": arrays}


def check_position(stored: dict[str, Any]) -> dict[str, Any]:
    """The position in a record.

    Raises:
        ValueError: It differs from what was saved.
    """
    if stored["position_checksum"] != _text_checksum(stored["position"]):
        raise ValueError("the position differs from what was saved")
    return stored["position"]


def check_state(state: Any, stored: dict[str, Any]) -> None:
    """Compares a state with its record.

    Raises:
        ValueError: An array differs from what was saved.
    """
    found, saved = record(state, {})["array_checksums"], stored["array_checksums"]
    differing = [name for name in {**found, **saved} if found.get(name) != saved.get(name)]
    if differing:
        raise ValueError(f"{', '.join(differing[:3])} differ from what was saved")


def _text_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
