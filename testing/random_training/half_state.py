"""Kahan summation, stochastic rounding and low-bit state from their rules: what the library's must equal bitwise.

The library rounds by integer arithmetic and by closed formulas. Here numbers are rounded by casts, by the spacing of
the dtype, and by a search in the table of all codes. Only the classes of the states are the library's.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax.optimizer_state import KahanState, LowBitState, StochasticRoundingState
from mpjax.optimizer_state.low_bit import Blockwise, Rounded


def is_half(x: Any) -> bool:
    """Whether a leaf is float16 or bfloat16."""
    return getattr(x, "dtype", None) in (jnp.float16, jnp.bfloat16)


def wide(tree: Any) -> Any:
    """The tree with half leaves in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


def toward(params: Any, target: Any, updates: Any) -> Any:
    """The updates that lead half params to their rounded target exactly."""

    def leaf(p: Any, t: Any, u: Any) -> Any:
        return t.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32) if is_half(p) else u

    return jax.tree.map(leaf, params, target, updates)


def kahan(inner: Any) -> Any:
    """The rounding error of each half param, times 2 ** (bits of its mantissa + 1), is added to the next sum."""
    inner = optax.with_extra_args_support(inner)

    def factor(p: Any) -> Any:
        return np.float32(2.0 ** (jnp.finfo(p.dtype).nmant + 1))

    def compensated(p: Any, c: Any) -> Any:
        if not is_half(p):
            return p
        own, error = p.astype(jnp.float32), c.astype(jnp.float32) / factor(p)
        # A larger error is not that of this param.
        return jnp.where((own + error * np.float32(1 - 2.0**-10)).astype(p.dtype) == p, own + error, own)

    def init(params: Any) -> Any:
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype) if is_half(p) else optax.MaskedNode(), params)
        return KahanState(zeros, inner.init(wide(params)))

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        full = jax.tree.map(compensated, params, state.compensation)
        updates, inner_state = inner.update(wide(grads), state.inner_state, full, **extra)
        sums = jax.tree.map(jnp.add, full, updates)
        deltas = toward(params, sums, updates)

        def missing(p: Any, t: Any, d: Any) -> Any:
            if not is_half(p):
                return optax.MaskedNode()
            new = (p.astype(jnp.float32) + d).astype(p.dtype).astype(jnp.float32)
            return jnp.where(jnp.isfinite(new), (t - new) * factor(p), 0).astype(p.dtype)

        return deltas, KahanState(jax.tree.map(missing, params, sums, deltas), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


# Random numbers: two words for each array from a threefry key, and a hash of each element's index with them.


def _first_key(seed: int) -> jax.Array:
    return jax.random.bits(jax.random.key(seed, impl="threefry2x32"), (2,), jnp.uint32)


def _next(key: jax.Array, count: int) -> Any:
    later, now = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"))
    return jax.random.key_data(later), jax.random.bits(now, (count, 2), jnp.uint32)


def _bits(words: jax.Array, shape: tuple[int, ...]) -> Any:
    """The hash `triple32` of the flat index."""
    x = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape) + words[0]
    for shift, word, factor in ((17, None, 0xED5AD4BB), (11, words[1], 0xAC4C1B51), (15, None, 0x31848BAB)):
        x = x ^ (x >> np.uint32(shift))
        x = (x if word is None else x ^ word) * np.uint32(factor)
    return x ^ (x >> np.uint32(14))


def _power(x: jax.Array) -> jax.Array:
    """The power of two at or below the size of each number."""
    exponent = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7F800000)
    return jax.lax.bitcast_convert_type(exponent, jnp.float32)


def rounded_at_random(x: jax.Array, dtype: Any, bits: jax.Array) -> jax.Array:
    """Up with the probability of the distance to the number below, in units of the spacing; the low bits decide.

    Near zero float16 has fewer bits, and the high bits decide.
    """
    info = jnp.finfo(dtype)
    size = jnp.abs(x)
    power = jnp.maximum(_power(x), np.float32(info.tiny))
    spacing = power * np.float32(2.0**-info.nmant)
    below = jnp.floor(size / spacing) * spacing
    share = size / spacing - below / spacing
    steps = 2 ** (23 - info.nmant)  # float32 numbers between two of `dtype`
    up = (bits % np.uint32(steps)).astype(jnp.float32) >= (1 - share) * np.float32(steps)
    if info.tiny > jnp.finfo(jnp.float32).tiny:
        near_zero = (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24) < share
        up = jnp.where(size < np.float32(info.tiny), near_zero, up)
    found = (jnp.sign(x) * jnp.where(up, below + spacing, below)).astype(dtype)
    return jnp.where(jnp.isfinite(found), found, x.astype(dtype))


def stochastic_rounding(inner: Any, *, seed: int = 0) -> Any:
    """The params are their sum with the updates, rounded at random."""
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return StochasticRoundingState(_first_key(seed), inner.init(wide(params)))

    def update(grads: Any, state: Any, params: Any, **extra: Any) -> Any:
        updates, inner_state = inner.update(wide(grads), state.inner_state, wide(params), **extra)
        tree: Any = jax.tree.structure(params)
        key, words = _next(state.key, tree.num_leaves)

        def rounded(p: Any, u: Any, word: Any) -> Any:
            return rounded_at_random(wide(p) + u, p.dtype, _bits(word, p.shape)) if is_half(p) else p

        target = jax.tree.map(rounded, params, updates, jax.tree.unflatten(tree, [*words]))
        return toward(params, target, updates), StochasticRoundingState(key, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


# Low bits: of a block's numbers, relative to the largest, each becomes the code below or above.


def _codes(dtype: Any, positive: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All codes from the lowest, without signs, and the values that they stand for, as float32."""
    if dtype == np.int8:
        units = np.arange(1, 257) if positive else np.arange(128)
        values = np.square(units.astype(np.float32) * np.float32(1 / (256 if positive else 127)))
    else:
        # The bytes from 0 to 0x7E are the finite float8 numbers from 0 to 448.
        units = np.arange(positive, 0x7F, dtype=np.uint8).view(dtype)
        values = units.astype(np.float32) * np.float32(1 / 448)
    return units.astype(np.float32), np.square(values) if positive else values


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """An array as (*leading dimensions, blocks, numbers of a block).

    A row, the last dimension or as many as hold half a block, is cut into the fewest equal blocks of at most `size`. If
    that takes twice the blocks needed, the last one is padded with the last number instead.
    """
    kept = x.ndim - 1
    while kept and math.prod(x.shape[kept:]) < size // 2:
        kept -= 1
    length = math.prod(x.shape[kept:])
    fewest = max(1, -(-length // size))
    count = min((n for n in range(fewest, 2 * fewest) if length % n == 0), default=fewest)
    rows = x.reshape(*x.shape[:kept], length)
    rows = jnp.pad(rows, [(0, 0)] * kept + [(0, -length % count)], mode="edge")
    return rows.reshape(*x.shape[:kept], count, -1)


def _unblocked(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    kept = blocks.ndim - 2
    length = math.prod(shape[kept:])
    return blocks.reshape(*blocks.shape[:kept], -1)[..., :length].reshape(shape)


def encoded(x: jax.Array, dtype: Any, size: int, bits: jax.Array) -> Blockwise:
    """Codes of the blocks, and their scales, which are negative for blocks without negative numbers."""
    rows, draws = _blocks(x, size), (_blocks(bits, size) >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)
    largest = jnp.max(jnp.abs(rows), -1, keepdims=True)
    stores = (largest > np.float32(2.0**-120)) & jnp.isfinite(largest)
    positive = jnp.all(rows >= 0, -1, keepdims=True) & stores
    # The power of two only keeps the inverse of a large number in float32's range.
    whole = jnp.where(stores, largest, 1)
    power = _power(whole)
    share = jnp.where(stores, jnp.abs(rows) / power * (1 / (whole / power)), 0)[..., None]

    def code(kind: bool) -> jax.Array:
        units, values = _codes(dtype, kind)
        below = jnp.max(jnp.where(values <= share, units, units[0])[..., :-1], -1)
        above = jnp.min(jnp.where(values > share, units, units[-1])[..., 1:], -1)
        low, high = (jnp.sum(jnp.where(units == u[..., None], values, 0), -1) for u in (below, above))
        return jnp.where(draws * (high - low) < share[..., 0] - low, above, below)

    signed = jnp.where(rows < 0, -code(False), code(False))
    offset = np.float32(129 if dtype == np.int8 else 0)
    codes = jnp.where(positive, code(True) - offset, signed).astype(dtype)
    scales = jnp.where(stores, jnp.where(positive, -largest, largest), 0)
    scales = jnp.where(jnp.isfinite(largest), scales, jnp.nan)
    return Blockwise(_unblocked(codes, x.shape), scales[..., 0])


def decoded(stored: Blockwise, size: int) -> jax.Array:
    """The values of the codes times the scales of their blocks."""
    dtype, scales = stored.codes.dtype, stored.scales[..., None]
    codes = _blocks(stored.codes, size).astype(jnp.float32)

    def value(kind: bool) -> jax.Array:
        units, values = _codes(dtype, kind)
        wanted = codes + 129 if kind and dtype == np.int8 else jnp.abs(codes)
        return jnp.sum(jnp.where(units == wanted[..., None], values, 0), -1)

    found = jnp.where(scales < 0, value(True), jnp.sign(codes) * value(False)) * jnp.abs(scales)
    return _unblocked(found, stored.codes.shape)


def low_bit_state(
    inner: Any, dtype: str = "int8", *, seed: int = 0, block_size: int = 256, min_size: int = 4096
) -> Any:
    """The float32 arrays of the state are stored in low bits between the steps."""
    inner = optax.with_extra_args_support(inner)
    stored_dtype = jnp.dtype({"float8": "float8_e4m3fn"}.get(dtype, dtype))
    is_stored = lambda x: isinstance(x, Rounded | Blockwise)

    def load(state: Any) -> Any:
        def leaf(x: Any) -> Any:
            if isinstance(x, Rounded):
                return x.values.astype(jnp.float32)
            return decoded(x, block_size) if isinstance(x, Blockwise) else x

        return jax.tree.map(leaf, state, is_leaf=is_stored)

    def store(state: Any, key: jax.Array, like: Any) -> Any:
        leaves, tree = jax.tree.flatten(state)
        key, words = _next(key, len(leaves))
        stored = []
        for i, (x, old) in enumerate(zip(leaves, jax.tree.leaves(like), strict=True)):
            if old.dtype != jnp.float32 or not old.ndim or old.size < min_size:
                stored.append(x)
            elif stored_dtype == jnp.bfloat16:
                stored.append(Rounded(rounded_at_random(x, jnp.bfloat16, _bits(words[i], x.shape))))
            else:
                stored.append(encoded(x, stored_dtype, block_size, _bits(words[i], x.shape)))
        return LowBitState(key, jax.tree.unflatten(tree, stored))

    def init(params: Any) -> Any:
        state = inner.init(params)
        return store(state, _first_key(seed), state)

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        loaded = load(state.inner_state)
        updates, new = inner.update(grads, loaded, params, **extra)
        return updates, store(new, state.key, loaded)

    return optax.GradientTransformationExtraArgs(init, update)
