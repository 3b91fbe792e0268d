"""Half parameters without float32 masters: stochastic rounding with keys that a checkpoint holds, Kahan summation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax.kernels.rounding import random_bits, round_stochastically, round_to_nearest
from mpjax.loss_scale.applying import Transformation, apply_gradients, as_transformation
from mpjax.loss_scale.cotangents import widened
from mpjax.policy import is_half, path_string


def key_from(seed: int | jax.Array) -> jax.Array:
    """A threefry key as raw data, which any checkpointer can save: shape (2,), uint32."""
    is_key = jnp.issubdtype(getattr(seed, "dtype", None) or np.dtype(int), jax.dtypes.prng_key)
    key = seed if is_key else jax.random.key(seed, impl="threefry2x32")
    return jax.random.bits(key, (2,), jnp.uint32)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def next_words(key: jax.Array, arrays: int) -> tuple[jax.Array, jax.Array]:
    """The key of the next step, and two random words for each array: shape (arrays, 2), uint32."""
    later, now = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"))
    return jax.random.key_data(later), jax.random.bits(now, (arrays, 2), jnp.uint32)


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`."""

    key: chex.Array  # shape=(2,), dtype=jnp.uint32; a threefry key, replaced at each step.
    inner_state: Any  # the wrapped transformation's state, initialised for the float32 tree.

    @property
    def rounds_params(self) -> str:
        """The name of the transformation, which makes up for the rounding of half params."""
        return "stochastic_rounding"


class KahanState(NamedTuple):
    """State of `kahan`."""

    # Same structure as the params: the rounding error of each half param times 2¹¹ (float16) or 2⁸ (bfloat16), in the
    # param's dtype, and `optax.MaskedNode()` for a param that is not half.
    compensation: Any
    inner_state: Any  # the wrapped transformation's state, initialised for the float32 tree.

    @property
    def rounds_params(self) -> str:
        """The name of the transformation, which makes up for the rounding of half params."""
        return "kahan"


def stochastic_rounding(
    inner: optax.GradientTransformation, *, seed: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that half-precision params need no master weights: updates are rounded stochastically.

    With rounding to nearest, an update smaller than half the spacing of a half-precision param vanishes.
    Rounding the sum up with probability (sum - below) / (above - below) preserves the mean:

        params ← stochastic_round(float32(params) + inner(grads in float32, params in float32))

    The params take 2 bytes each. They follow a random walk around the float32 path, by about half a spacing
    a step, which is largest in bfloat16. `kahan` and `master_weights` do not have this noise. A zero update never
    changes a param.

    Args:
        inner: The optimizer. It sees float32 gradients and params, so its state is float32 (see `low_bit_state`).
        seed: An integer or a `jax.random.key`. Each step and each array has its own random numbers.
            Replicas that hold the same params need the same seed, so that they round in the same way.

    Returns:
        An `optax.GradientTransformationExtraArgs` with a `StochasticRoundingState`. Wrap loss scaling around it. Its
        updates are float32, for `optax.apply_updates` or `mpjax.apply_gradients`. Float32 params are updated as usual.

    Raises:
        ValueError: In `update`, no `params`.
        TypeError: `inner` is not an optax transformation.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> tx = mpjax.stochastic_rounding(optax.sgd(1.0))
        >>> params = jnp.ones(10_000, jnp.bfloat16)  # whose spacing above 1 is 2**-7
        >>> params, state = mpjax.apply_gradients(tx, jnp.full(10_000, -(2.0**-10)), tx.init(params), params)
        >>> moved = params > 1
        >>> bool(0.1 < moved.mean() < 0.15)  # an eighth of them, by 2**-7
        True

    Source: Gupta et al. 2015, Deep Learning with Limited Numerical Precision (https://arxiv.org/abs/1502.02551);
    for training in bfloat16, Zamirai et al. 2020 (https://arxiv.org/abs/2010.06192).
    """
    inner = as_transformation(inner)

    def init(params: Any) -> StochasticRoundingState:
        return StochasticRoundingState(key_from(seed), inner.init(widened(params)))

    def rounder(state: StochasticRoundingState, params: Any) -> tuple[Any, Callable[[Any, Any], Any]]:
        key, words = next_words(state.key, len(jax.tree.leaves(params)))
        each = iter(words)

        def rounded(p: jax.Array, target: jax.Array) -> jax.Array:
            bits = next(each)
            return round_stochastically(target, p.dtype, random_bits(bits, p.shape)) if is_half(p) else target

        return key, lambda params, targets: jax.tree.map(rounded, params, targets)

    def update(grads: Any, state: StochasticRoundingState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        wide = widened(required(params, "stochastic_rounding"))
        updates, inner_state = inner.update(widened(grads), state.inner_state, wide, **extra)
        key, rounded = rounder(state, params)
        targets = rounded(params, optax.apply_updates(wide, updates))
        return jax.tree.map(_delta, params, targets, updates), StochasticRoundingState(key, inner_state)

    def apply(grads: Any, state: StochasticRoundingState, params: Any, **extra: Any) -> tuple[Any, Any]:
        targets, inner_state = apply_gradients(inner, widened(grads), state.inner_state, widened(params), **extra)
        key, rounded = rounder(state, params)
        return rounded(params, targets), StochasticRoundingState(key, inner_state)

    return Transformation.make(init, update, apply, decides=False)


def kahan(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that half-precision params are updated by compensated (Kahan) summation.

    The rounding error of a param's update is stored in the param's own dtype, and added to the next update:

        sum ← float32(params) + float32(compensation) + inner(grads in float32, the same sum)
        params ← round(sum);   compensation ← round(sum - params)

    Together they hold 22 bits of significand in float16, and 16 in bfloat16, in 4 bytes a param. Half params with
    master weights take 6. (The compensation is stored multiplied by a power of two. Otherwise that of a small float16
    param would underflow.) A param that was changed outside, so that the compensation is more than half its spacing,
    starts without one.

    Args:
        inner: The optimizer. It sees float32 gradients and the compensated params, so its state is float32 (see
            `low_bit_state`).

    Returns:
        An `optax.GradientTransformationExtraArgs` with a `KahanState`. Wrap loss scaling around it. Its updates are
        float32, for `optax.apply_updates` or `mpjax.apply_gradients`. Float32 params are updated as usual.

    Raises:
        ValueError: In `update`, no `params`, or params of another dtype than at `init`.
        TypeError: `inner` is not an optax transformation.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> tx = mpjax.kahan(optax.sgd(1.0))
        >>> params = jnp.ones((), jnp.bfloat16)
        >>> state = tx.init(params)
        >>> for _ in range(8):  # each step is an eighth of bfloat16's spacing above 1
        ...     params, state = mpjax.apply_gradients(tx, jnp.float32(-(2.0**-10)), state, params)
        >>> float(params) == 1 + 2**-7
        True

    Source: Kahan 1965, Further remarks on reducing truncation errors (https://doi.org/10.1145/363707.363723);
    for training in bfloat16, Zamirai et al. 2020 (https://arxiv.org/abs/2010.06192).
    """
    inner = as_transformation(inner)

    def init(params: Any) -> KahanState:
        compensation = jax.tree.map(lambda p: jnp.zeros_like(p) if is_half(p) else optax.MaskedNode(), params)
        return KahanState(compensation, inner.init(widened(params)))

    def update(grads: Any, state: KahanState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        full = _compensated(required(params, "kahan"), state.compensation)
        updates, inner_state = inner.update(widened(grads), state.inner_state, full, **extra)
        targets = optax.apply_updates(full, updates)
        deltas = jax.tree.map(lambda p, t, u: _delta(p, _nearest(p, t), u), params, targets, updates)
        # The new params. A param that shrinks by more than 2¹² in one step may miss its target by float32's rounding of
        # the step. That error can exceed half its spacing, and is then dropped by the next step.
        reached = jax.tree.map(lambda p, d: _nearest(p, widened(p) + d), params, deltas)
        return deltas, KahanState(_compensation(params, targets, reached), inner_state)

    def apply(grads: Any, state: KahanState, params: Any, **extra: Any) -> tuple[Any, Any]:
        full = _compensated(params, state.compensation)
        targets, inner_state = apply_gradients(inner, widened(grads), state.inner_state, full, **extra)
        reached = jax.tree.map(_nearest, params, targets)
        return reached, KahanState(_compensation(params, targets, reached), inner_state)

    return Transformation.make(init, update, apply, decides=False)


def required(params: Any, name: str) -> Any:
    """The params, which the update of a transformation needs."""
    if params is None:
        raise ValueError(f"{name}: update needs the params: tx.update(grads, state, params).")
    return params


def _delta(p: jax.Array, target: jax.Array, update: jax.Array) -> jax.Array:
    """The float32 update that turns a half param into its half target."""
    return target.astype(jnp.float32) - p.astype(jnp.float32) if is_half(p) else update


def _nearest(p: jax.Array, target: jax.Array) -> jax.Array:
    return round_to_nearest(target, p.dtype) if is_half(p) else target


def _magnification(p: jax.Array) -> np.float32:
    """The factor that scales the largest compensation, half the param's spacing, to the param's magnitude."""
    return np.float32(2.0 ** (int(jnp.finfo(p.dtype).nmant) + 1))


def _compensated(params: Any, compensation: Any) -> Any:
    """The float32 sum of the params and their compensation."""

    def leaf(path: Any, p: Any, c: Any) -> Any:
        if isinstance(c, optax.MaskedNode) == is_half(p):
            had = "no compensation" if is_half(p) else "a compensation"
            raise ValueError(
                f"kahan: the param {path_string(path)} is {p.dtype}, but the state holds {had} for it: the params were "
                "cast after tx.init. Cast the params to the policy's param dtype first, then call tx.init."
            )
        if not is_half(p):
            return p
        own, error = p.astype(jnp.float32), c.astype(jnp.float32) / _magnification(p)
        # An error of more than half a spacing belongs to a param that was changed outside. (The factor: rounding the
        # error itself may make it half a spacing.)
        is_own = round_to_nearest(own + error * np.float32(1 - 2.0**-10), p.dtype) == p
        return jnp.where(is_own, own + error, own)

    return jax.tree_util.tree_map_with_path(leaf, params, compensation)


def _compensation(params: Any, targets: Any, reached: Any) -> Any:
    def leaf(p: Any, target: jax.Array, reached: jax.Array) -> Any:
        if not is_half(p):
            return optax.MaskedNode()
        missing = (target - reached.astype(jnp.float32)) * _magnification(p)
        # The error of an overflowed param is infinite, and would make the next sum NaN.
        return jnp.where(jnp.isfinite(reached), missing, np.float32(0)).astype(p.dtype)

    return jax.tree.map(leaf, params, targets, reached)
