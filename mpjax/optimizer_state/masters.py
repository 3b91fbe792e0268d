"""Float32 master copies of half-precision parameters, as an optax transformation."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax.kernels.rounding import round_to_nearest
from mpjax.loss_scale import applying
from mpjax.loss_scale.applying import apply_gradients, as_transformation
from mpjax.loss_scale.cotangents import widened
from mpjax.optimizer_state.rounding import required
from mpjax.policy import HALF_DTYPES, get_policy, is_half, path_string


class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    # Same structure as the params: float32 for a half param, `optax.MaskedNode()` for one that is its own master.
    master: Any
    inner_state: Any  # the wrapped transformation's state, initialised for the float32 tree.

    @property
    def rounds_params(self) -> str:
        """The name of the transformation, which makes up for the rounding of half params."""
        return "master_weights"


def master_weights(inner: optax.GradientTransformation, policy: Any = "O2") -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer so that half-precision params are updated through a float32 master copy.

    A small update vanishes when it is added to a half-precision number (1 + 2⁻¹² = 1 in float16).
    The state therefore keeps a float32 copy of each half leaf. `inner` updates the copy, and the params are its
    rounded value:

        master ← master + inner(grads in float32, master)
        params ← round(master)            exactly, after optax.apply_updates or mpjax.apply_gradients

    A param that was changed outside (a checkpoint that is loaded, weight clipping), and so is not its master rounded,
    becomes its own master at the next step.
    Leaves that the policy keeps in float32 (norm parameters under O2) are their own masters and take no extra memory.

    `init` takes the params in half or in float32. From float32 params, a checkpoint's, the masters keep every bit, and
    the params of the first step are `policy.cast_to_param` of them.

    Args:
        inner: The optimizer. Its state (moments) is float32 throughout.
        policy: Anything that `get_policy` accepts. If neither it nor any override has half params,
            `inner` is returned unchanged, so a script needs no branch.

    Returns:
        An `optax.GradientTransformationExtraArgs`. Wrap loss scaling around it:
        `loss_scale_for(master_weights(optax.adamw(1e-3), policy), policy)`. Its updates are float32, for
        `optax.apply_updates` (which casts to the params' dtype; `eqx.apply_updates` does not:
        use optax's or `mpjax.apply_gradients`).

    Raises:
        ValueError: Unknown policy; in `update`, no `params`, or params of another dtype than at `init`.
        TypeError: `inner` is not an optax transformation.

    Example:
        >>> import jax.numpy as jnp, optax, mpjax
        >>> tx = mpjax.master_weights(optax.sgd(1.0), "O2")
        >>> params = {"w": jnp.ones(1, jnp.float16)}
        >>> state = tx.init(params)
        >>> for _ in range(4):  # each step is below half the spacing of float16 at 1
        ...     params, state = mpjax.apply_gradients(tx, {"w": jnp.full(1, -(2.0**-12))}, state, params)
        >>> float(params["w"][0]) == 1 + 2**-10
        True

    Source: Micikevicius et al. 2018, section 3.1 (https://arxiv.org/abs/1710.03740).
    """
    applying.refuse_swapped("master_weights", inner, policy)
    inner = as_transformation(inner)
    policy = get_policy(policy)
    if not HALF_DTYPES & {policy.param_dtype, *(override.param_dtype for _, override in policy.overrides)}:
        return inner

    def init(params: Any) -> MasterWeightsState:
        params = applying.without_overwritten(applying.trainable(params))
        has_master = jax.tree.map(lambda p, half: is_half(p) or half, params, policy.stores_in_half(params))
        master = jax.tree.map(lambda p, has: p.astype(jnp.float32) if has else optax.MaskedNode(), params, has_master)
        return MasterWeightsState(master, inner.init(widened(params)))

    def advance(grads: Any, state: MasterWeightsState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """The updates of the params that are not half, and a state with the new masters."""
        params = required(params, "master_weights")
        full = _adopted(_full(state.master, params), params)
        updates, inner_state = inner.update(widened(grads), state.inner_state, full, **extra)
        target = optax.apply_updates(full, updates)
        others = jax.tree.map(lambda p, u: optax.MaskedNode() if is_half(p) else u, params, updates)
        return others, MasterWeightsState(_masters(state.master, target), inner_state)

    def finish(others: Any, state: MasterWeightsState, params: Any, taken: Any = True) -> tuple[Any, Any]:
        """The updates that turn the params into the rounded masters, or zeros if the step was skipped."""
        deltas = jax.tree.map(functools.partial(_delta, taken), params, _full(state.master, params), others)
        # A master becomes params + delta, summed in float32, only where that sum misses the rounded master. It is then
        # within float32's rounding of the step, and "params are the rounded master" holds exactly.
        masters = jax.tree.map(functools.partial(_reached, taken), params, deltas, state.master)
        return deltas, MasterWeightsState(masters, state.inner_state)

    def update(grads: Any, state: MasterWeightsState, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        return finish(*advance(grads, state, params, **extra), params)

    def apply(grads: Any, state: MasterWeightsState, params: Any, **extra: Any) -> tuple[Any, Any]:
        full = _adopted(_full(state.master, params), params)
        target, inner_state = apply_gradients(inner, widened(grads), state.inner_state, full, **extra)
        rounded = jax.tree.map(lambda p, t: t.astype(p.dtype), params, target)
        return rounded, MasterWeightsState(_masters(state.master, target), inner_state)

    return applying.Transformation.make(init, update, apply, decides=False, parts=(advance, finish))


def _adopted(full: Any, params: Any) -> Any:
    """The float32 tree, where a param that is not its master rounded is its own master.

    Something other than the optimizer changed it: a checkpoint that was loaded, weight clipping, an average.
    """

    def leaf(f: jax.Array, p: jax.Array) -> jax.Array:
        # Not a cast, which XLA may remove together with the one back.
        return jnp.where(round_to_nearest(f, p.dtype) == p, f, p.astype(jnp.float32)) if is_half(p) else f

    return jax.tree.map(leaf, full, params)


def _delta(taken: Any, p: jax.Array, target: jax.Array, update: Any) -> Any:
    """The float32 update that turns a half param into the rounded target."""
    if not is_half(p):
        return update
    delta = target.astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32)
    return delta if taken is True else jnp.where(taken, delta, 0)


def _reached(taken: Any, p: jax.Array, delta: jax.Array, master: Any) -> Any:
    if not is_half(p):
        return master
    arrived = p.astype(jnp.float32) + delta
    # A param that shrinks by more than 2¹² in one step is the only case where the float32 sum can miss
    # the half target. The master is then the sum.
    met = arrived.astype(p.dtype) == master.astype(p.dtype)
    return jnp.where(met if taken is True else met | ~taken, master, arrived)


def _masters(master: Any, full: Any) -> Any:
    """The new masters, of the params that had one."""
    return jax.tree.map(lambda m, f: m if _is_missing(m) else f, master, full, is_leaf=_is_missing)


def _is_missing(master: Any) -> bool:
    return isinstance(master, optax.MaskedNode)


def _full(master: Any, params: Any) -> Any:
    """The float32 tree: the master of each half param, and the other params themselves."""

    def leaf(path: Any, p: Any, m: Any) -> Any:
        if _is_missing(m) and is_half(p):
            raise ValueError(
                f"master_weights: the param {path_string(path)} is {p.dtype}, but the state holds no master copy of "
                "it. Give tx.update the params that policy.cast_to_param returns, for the policy given to "
                "master_weights, and tx.init those or the float32 ones, which it keeps as masters."
            )
        return m if is_half(p) else p

    return jax.tree_util.tree_map_with_path(leaf, params, master)
