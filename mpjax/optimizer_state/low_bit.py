"""Optimizer state in one or two bytes per number: moments in bfloat16, float8 or blockwise int8."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from mpjax.kernels.rounding import fraction, random_bits, round_stochastically
from mpjax.loss_scale.applying import Transformation, apply_gradients, as_transformation
from mpjax.optimizer_state.masters import MasterWeightsState
from mpjax.optimizer_state.rounding import KahanState, key_from, next_words
from mpjax.policy import path_matches, path_string
from mpjax.program.objects import held

FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_DTYPES = {
    "bfloat16": np.dtype(jnp.bfloat16),
    "bf16": np.dtype(jnp.bfloat16),
    "float8": FLOAT8,
    "float8_e4m3fn": FLOAT8,
    "int8": np.dtype(np.int8),
}


class LowBitState(NamedTuple):
    """State of `low_bit_state`."""

    key: chex.Array  # shape=(2,), dtype=jnp.uint32; a threefry key, replaced at each step.
    # The wrapped transformation's state, with `Rounded` or `Blockwise` in place of large float32 arrays.
    inner_state: Any


class Rounded(NamedTuple):
    """A float32 array stored in bfloat16."""

    values: chex.Array  # shape of the array, dtype=jnp.bfloat16


def low_bit_state(
    inner: optax.GradientTransformation,
    dtype: Any = "int8",
    *,
    seed: int | jax.Array = 0,
    block_size: int = 256,
    min_size: int = 4096,
    keep: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its moments are stored in one or two bytes per number.

        state ← store(inner(grads, load(state)))      inner computes in float32

    - `"bfloat16"`: 2 bytes.
    - `"int8"`, `"float8"`: 1 byte, and a float32 scale for each block of 256. Codes follow a power law that
      preserves small numbers, and a second moment is never flushed to zero: see `mpjax.optimizer_state.low_bit`.

    All formats are rounded stochastically. With rounding to nearest, a second moment that decays by 0.1 % a step would
    never change, because that is less than half the spacing of each format.

    Only float32 arrays of at least `min_size` elements are stored in `dtype`. Counters, schedules and small arrays are
    unchanged.

    Args:
        inner: The optimizer, such as `optax.adamw(1e-3)`.
        dtype: `"bfloat16"`, `"float8"` (e4m3fn) or `"int8"`, or the dtype itself.
        seed: An integer or a `jax.random.key`. Each step and each array has its own random numbers.
        block_size: Maximum number of elements that share a scale.
        min_size: Minimum number of elements of an array to be stored in `dtype`.
        keep: Patterns of paths in the inner state that stay float32, such as `"*/nu"`, as in a policy's overrides.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a `LowBitState`. Wrap transformations with other kinds of
        state around it, not inside: `dynamic_loss_scale(optax.MultiSteps(stochastic_rounding(low_bit_state(tx)), k))`.

    Raises:
        ValueError: An unknown dtype, sizes below 1, a pattern in `keep` that no array's path matches, or
            master weights in `inner`, whose precision low bits would destroy.
        TypeError: `inner` is not an optax transformation.

    Example:
        >>> import jax, jax.numpy as jnp, optax, mpjax
        >>> params = {"w": jnp.ones((64, 256), jnp.bfloat16)}
        >>> tx = mpjax.stochastic_rounding(mpjax.low_bit_state(optax.adamw(1e-3), "int8"))
        >>> held = jax.tree.leaves((params, tx.init(params)))
        >>> round(sum(x.nbytes for x in held) / params["w"].size, 2)  # bytes a param; 12 in float32
        4.03

    Source: Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (https://arxiv.org/abs/2110.02861);
    no zero for the second moment, Li et al. 2023 (https://arxiv.org/abs/2309.01507).
    """
    inner = as_transformation(inner)
    stored_dtype = _checked_dtype(dtype)
    for name, count in (("block_size", block_size), ("min_size", min_size)):
        if not (isinstance(count, int) and count >= 1):
            raise ValueError(f"low_bit_state({name}={count!r}): must be a positive integer.")

    def init(params: Any) -> LowBitState:
        state = inner.init(params)
        _refuse_masters(state)
        _refuse_unused(keep, state)
        first, words = next_words(key_from(seed), len(jax.tree.leaves(state)))
        # The barrier prevents constant folding: under `jit` XLA would encode the zeros at compile time, for minutes.
        return LowBitState(first, store(jax.lax.optimization_barrier(state), words, state))

    def store(state: Any, words: jax.Array, like: Any) -> Any:
        """Encodes the leaves for which `like`, the loaded state, has a large float32 array."""
        each = iter(words)

        def leaf(path: Any, x: Any, old: Any) -> Any:
            words = next(each)
            large = getattr(old, "dtype", None) == jnp.float32 and old.ndim and old.size >= min_size
            if not large or any(path_matches(path_string(path), pattern) for pattern in keep):
                return x
            bits = random_bits(words, x.shape)
            if stored_dtype == jnp.bfloat16:
                return Rounded(round_stochastically(x, jnp.bfloat16, bits))
            return encode(x, stored_dtype, block_size, bits)

        return jax.tree_util.tree_map_with_path(leaf, state, like)

    def step(function: Any, state: LowBitState) -> tuple[Any, LowBitState]:
        loaded = _load(state.inner_state)
        out, new = function(loaded)
        key, words = next_words(state.key, len(jax.tree.leaves(new)))
        return out, LowBitState(key, store(new, words, loaded))

    def update(grads: Any, state: LowBitState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return step(lambda loaded: inner.update(grads, loaded, params, **extra), state)

    def apply(grads: Any, state: LowBitState, params: Any, **extra: Any) -> tuple[Any, Any]:
        return step(lambda loaded: apply_gradients(inner, grads, loaded, params, **extra), state)

    return Transformation.make(init, update, apply, decides=False)


def _checked_dtype(dtype: Any) -> np.dtype:
    try:
        found = _DTYPES[dtype] if isinstance(dtype, str) else np.dtype(dtype)
    except (KeyError, TypeError):
        found = np.dtype(object)
    if dtype is None or found not in _DTYPES.values():
        raise ValueError(f"low_bit_state(dtype={dtype!r}): give one of 'bfloat16', 'float8' (e4m3fn), 'int8'.")
    return found


def _load(state: Any) -> Any:
    def leaf(x: Any) -> Any:
        if isinstance(x, Rounded):
            return x.values.astype(jnp.float32)
        return decode(x) if isinstance(x, Blockwise) else x

    return jax.tree.map(leaf, state, is_leaf=lambda x: isinstance(x, Rounded | Blockwise))


def _refuse_masters(state: Any) -> None:
    holders = (MasterWeightsState, KahanState)
    for x in held(state, lambda x: isinstance(x, holders)):
        raise ValueError(
            f"low_bit_state: the wrapped optimizer holds the state of {x.rounds_params}, whose precision low bits "
            f"would destroy. Wrap the other way round: {x.rounds_params}(low_bit_state(tx))."
        )


def _refuse_unused(keep: Sequence[str], state: Any) -> None:
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for pattern in keep:
        if not any(path_matches(path, pattern) for path in paths):
            raise ValueError(f"low_bit_state(keep={keep!r}): {pattern!r} matches none of the state's paths: {paths}.")


# Arrays with 8 bits per number: one scale for each block, and codes that are denser for small numbers.
#
# A block is about 256 adjacent numbers. Its scale is its largest magnitude. The ratio r of each number to the scale,
# in [0, 1], is rounded stochastically to the code u below or above, so that the mean is preserved:
#
#               a block with signs             a block of numbers >= 0
#     int8      r = (u/127)², u = 0..127       r = (u/256)⁴, u = 1..256
#     float8    r = u/448                      r = (u/448)², u > 0
#
# Linearly spaced codes would flush most of Adam's second moment to zero, and an update divides by its root. A block of
# numbers >= 0, as in every second moment, is therefore stored as its root and has no code for zero. The sign of the
# scale distinguishes the two kinds of blocks. A block of zeros has the scale 0 and stays zero. A block with an infinity
# or a NaN has the scale NaN, and all of it becomes NaN: no state that has left float32's range looks like a number.


_FLOAT8_TOP, _FLOAT8_TINY = 448.0, 2.0**-9
_TINY = np.float32(2.0**-120)


class Blockwise(NamedTuple):
    """An array stored with 8 bits per number."""

    codes: chex.Array  # shape of the array, dtype=int8 or float8_e4m3fn
    scales: chex.Array  # shape=(*leading, blocks), dtype=float32; negative if a block's numbers are all >= 0


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def encode(x: jax.Array, dtype: Any, block_size: int, bits: jax.Array) -> Blockwise:
    """Encodes an array with 8 bits per number, rounded stochastically.

    Args:
        x: float32 array of at least one dimension.
        dtype: int8 or float8_e4m3fn.
        block_size: Maximum number of elements that share a scale.
        bits: Random bits, a uint32 array of `x`'s shape.
    """
    leading, blocks = _layout(x.shape, block_size)
    spec = jax.typeof(x).sharding.spec
    # The scales of an array that is sharded along a dimension of its blocks are sharded too, if they divide evenly.
    along = spec[leading] if blocks % _devices(x, spec[leading]) == 0 else None
    to = Blockwise(spec, PartitionSpec(*spec[:leading], along))
    return _on_automatic_axes(lambda x, bits: encode_with(block_scales(x, block_size), x, dtype, bits), to, x, bits)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def block_scales(x: jax.Array, block_size: int) -> jax.Array:
    """The scale of each block, [*leading, blocks]: its largest magnitude, negative if all its numbers are >= 0.

    The scale of a nearly zero block is 0, because a quotient by a denormal scale could be infinite. The scale of a
    block with an infinity or NaN is NaN.
    """
    rows = _rows(x, *_layout(x.shape, block_size))
    largest = jnp.max(jnp.abs(rows), -1)
    scales = jnp.where(jnp.min(rows, -1) >= 0, -largest, largest)
    scales = jnp.where(largest > _TINY, scales, np.float32(0))
    # A NaN compares false everywhere above, but its block must not become finite.
    return jnp.where(jnp.isfinite(largest), scales, largest + (largest - largest))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def encode_with(scales: jax.Array, x: jax.Array, dtype: Any, bits: jax.Array) -> Blockwise:
    """`encode` with given `block_scales` of `x`, so that `x` is not read again to compute them."""
    form = _FORMS[np.dtype(dtype)]
    layout = scales.ndim - 1, scales.shape[-1]
    rows, draws = _rows(x, *layout), _rows(bits, *layout)
    largest, positive = jnp.abs(scales)[..., None], (scales < 0)[..., None]
    # The inverse of a scale above 2¹²⁶ is denormal, and 0 in XLA (so is a quotient, which XLA turns into a product).
    unit = jnp.where(largest > 1, np.float32(2.0**-64), np.float32(1))
    inverse = 1 / jnp.maximum(largest * unit, _TINY)
    # The codes of a block without a scale, 0 or NaN, are zeros.
    share = jnp.where(largest > _TINY, jnp.abs(rows) * unit * inverse, np.float32(0))
    lower, upper = form.neighbours(share, positive)
    low_value, high_value = form.share(lower, positive), form.share(upper, positive)
    units = jnp.where(fraction(draws) * (high_value - low_value) < share - low_value, upper, lower)
    codes = form.store(jnp.where(rows < 0, -units, units), positive)
    return Blockwise(_unblocked(codes, x.shape), scales)


@functools.partial(jax.jit, inline=True)
def decode(stored: Blockwise) -> jax.Array:
    """Decodes to a float32 array."""
    return _on_automatic_axes(_decoded, jax.typeof(stored.codes).sharding.spec, stored)


def _on_automatic_axes(fun: Callable[..., Any], to: Any, *args: Any) -> Any:
    """`fun(*args)`, whose reshapes XLA shards where the mesh has explicit axes, with results sharded as `to` says."""
    explicit = [x for x in jax.tree.leaves(args) if jax.typeof(x).sharding.mesh.explicit_axes]
    return jax.sharding.auto_axes(fun, out_sharding=to)(*args) if explicit else fun(*args)


def _devices(x: jax.Array, axes: Any) -> int:
    """The number of shards along a dimension with these mesh axes."""
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(jax.typeof(x).sharding.mesh.shape[name] for name in names)


def _decoded(stored: Blockwise) -> jax.Array:
    shape = stored.codes.shape
    form = _FORMS[np.dtype(stored.codes.dtype)]
    scales = stored.scales[..., None]
    rows = _rows(stored.codes, stored.scales.ndim - 1, stored.scales.shape[-1])
    positive = scales < 0
    units = form.load(rows, positive)
    size = form.share(jnp.abs(units), positive) * jnp.abs(scales)
    return _unblocked(jnp.where(units < 0, -size, size), shape)


class _Int8:
    def neighbours(self, share: jax.Array, positive: jax.Array) -> tuple[jax.Array, jax.Array]:
        root = jnp.sqrt(share)
        top = jnp.where(positive, np.float32(256), np.float32(127))
        bottom = positive.astype(jnp.float32)
        lower = jnp.clip(jnp.floor(jnp.where(positive, jnp.sqrt(root), root) * top), bottom, top - 1)
        return lower, lower + 1

    def share(self, units: jax.Array, positive: jax.Array) -> jax.Array:
        square = jnp.square(units * jnp.where(positive, np.float32(1 / 256), np.float32(1 / 127)))
        return jnp.where(positive, jnp.square(square), square)

    def store(self, units: jax.Array, positive: jax.Array) -> jax.Array:
        return jnp.where(positive, units - 129, units).astype(jnp.int8)

    def load(self, codes: jax.Array, positive: jax.Array) -> jax.Array:
        units = codes.astype(jnp.float32)
        return jnp.where(positive, units + 129, units)


class _Float8:
    def neighbours(self, share: jax.Array, positive: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jnp.where(positive, jnp.sqrt(share), share) * np.float32(_FLOAT8_TOP)
        y = jnp.maximum(y, jnp.where(positive, np.float32(_FLOAT8_TINY), np.float32(0)))
        exponent = jax.lax.bitcast_convert_type(y, jnp.uint32) & np.uint32(0x7F800000)
        power = jax.lax.bitcast_convert_type(exponent, jnp.float32)  # of two, at most y
        spacing = jnp.maximum(power * np.float32(1 / 8), np.float32(_FLOAT8_TINY))
        lower = jnp.floor(y / spacing) * spacing
        return lower, jnp.minimum(lower + spacing, np.float32(_FLOAT8_TOP))

    def share(self, units: jax.Array, positive: jax.Array) -> jax.Array:
        linear = units * np.float32(1 / _FLOAT8_TOP)
        return jnp.where(positive, jnp.square(linear), linear)

    def store(self, units: jax.Array, positive: jax.Array) -> jax.Array:
        return units.astype(FLOAT8)

    def load(self, codes: jax.Array, positive: jax.Array) -> jax.Array:
        return codes.astype(jnp.float32)


_FORMS: dict[np.dtype, _Int8 | _Float8] = {np.dtype(np.int8): _Int8(), FLOAT8: _Float8()}


def _layout(shape: tuple[int, ...], block_size: int) -> tuple[int, int]:
    """The number of leading dimensions that are kept, and of blocks in each row of the remaining dimensions.

    Blocks lie along the last dimension, so that each block of an array sharded along an earlier one is on one device.
    A short last dimension is merged with those before it. Blocks divide a row evenly, unless that would make them
    much shorter than `block_size`.
    """
    leading = len(shape) - 1
    while leading and math.prod(shape[leading:]) < block_size // 2:
        leading -= 1
    length = math.prod(shape[leading:])
    fewest = max(1, math.ceil(length / block_size))
    return leading, next((n for n in range(fewest, 2 * fewest) if length % n == 0), fewest)


def _rows(x: jax.Array, leading: int, blocks: int) -> jax.Array:
    """Reshapes to (*leading, blocks, block). Pads by repeating the last number, which changes no block's range."""
    x = x.reshape(*x.shape[:leading], -1)
    missing = -x.shape[-1] % blocks
    if missing:
        x = jnp.concatenate([x, jnp.repeat(x[..., -1:], missing, -1)], -1)
    return x.reshape(*x.shape[:-1], blocks, -1)


def _unblocked(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    flat = rows.reshape(*rows.shape[:-2], -1)
    length = math.prod(shape[rows.ndim - 2 :])
    return flat[..., :length].reshape(shape)
