"""Optimizer state in one or two bytes per number: moments in bfloat16, float8 or blockwise int8."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax.loss_scale.applying import Transformation, apply_gradients, as_transformation
from mpjax.optimizer_state.blockwise import FLOAT8, Blockwise, decode, encode
from mpjax.optimizer_state.half_params import KahanState
from mpjax.optimizer_state.masters import MasterWeightsState
from mpjax.optimizer_state.rounding import key_from, next_words, random_bits, round_stochastically
from mpjax.policy import path_matches, path_string

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
    keep: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that its moments are stored in one or two bytes per number.

        state ← store(inner(grads, load(state)))      inner computes in float32

    - `"bfloat16"`: 2 bytes.
    - `"int8"`, `"float8"`: 1 byte, and a float32 scale for each block of 256. Codes follow a power law that
      preserves small numbers, and a second moment is never flushed to zero: see `mpjax.optimizer_state.blockwise`.

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


def _is_stored(x: Any) -> bool:
    return isinstance(x, Rounded | Blockwise)


def _load(state: Any) -> Any:
    def leaf(x: Any) -> Any:
        if isinstance(x, Rounded):
            return x.values.astype(jnp.float32)
        return decode(x) if isinstance(x, Blockwise) else x

    return jax.tree.map(leaf, state, is_leaf=_is_stored)


def _refuse_masters(state: Any) -> None:
    holders = (MasterWeightsState, KahanState)
    for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, holders)):
        if isinstance(x, holders):
            name = "master_weights" if isinstance(x, MasterWeightsState) else "kahan"
            raise ValueError(
                f"low_bit_state: the wrapped optimizer holds the state of {name}, whose precision low bits would "
                f"destroy. Wrap the other way round: {name}(low_bit_state(tx))."
            )


def _refuse_unused(keep: tuple[str, ...], state: Any) -> None:
    paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    for pattern in keep:
        if not any(path_matches(path, pattern) for path in paths):
            raise ValueError(f"low_bit_state(keep={keep!r}): {pattern!r} matches none of the state's paths: {paths}.")
