"""Converts a training state to another precision, so that a run can continue in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from examples.common.training import TrainState


def float32_params(state: TrainState) -> Any:
    """The parameters in float32: the master weights where the state has them."""
    inner = state.opt_state.inner_state
    master = inner.master if isinstance(inner, mpjax.MasterWeightsState) else None
    if master is None:
        return jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
    # A leaf without a master is already float32. Its place holds a node without leaves.
    leaves = jax.tree.leaves(master, is_leaf=_is_masked)
    params, treedef = jax.tree.flatten(state.params)
    return jax.tree.unflatten(treedef, [p if _is_masked(m) else m for p, m in zip(params, leaves, strict=True)])


def inner_state(state: TrainState) -> Any:
    """The optimizer's state inside those of the loss scale and the masters."""
    inner = state.opt_state.inner_state
    return inner.inner_state if isinstance(inner, mpjax.MasterWeightsState) else inner


def change_precision(old: TrainState, new: TrainState, policy: mpjax.Policy) -> TrainState:
    """Converts the state `old` to the precision of `new`.

    Parameters (through their float32 masters), statistics, EMA, the optimizer's momentum and counts, and the count of
    skipped steps carry over. The loss scale and its count of good steps start as in the new precision, since a
    scale found for float16 does not apply to bfloat16.

    Args:
        old: The restored state.
        new: An initial state in the new precision. Of its values, only the loss scale is used.
        policy: The new policy.
    """
    changed = with_params(new, float32_params(old), policy, inner_state(old))
    scaling = new.opt_state
    return old._replace(
        params=changed.params,
        opt_state=old.opt_state._replace(
            inner_state=changed.opt_state.inner_state,
            loss_scale=scaling.loss_scale,
            good_steps=scaling.good_steps,
            consecutive_skips=scaling.consecutive_skips,
        ),
    )


def with_params(new: TrainState, params: Any, policy: mpjax.Policy, inner: Any = None) -> TrainState:
    """Replaces the parameters of a state and keeps its precision. Masters, if any, are bitwise equal to `params`.

    Args:
        new: The state.
        params: float32 parameters.
        policy: Policy of the state.
        inner: The optimizer's state inside those of the loss scale and the masters; by default that of `new`.
    """
    target = new.opt_state.inner_state
    if isinstance(target, mpjax.MasterWeightsState):
        leaves = zip(jax.tree.leaves(params), jax.tree.leaves(new.params), strict=True)
        # A copy, because the step donates its state and a buffer can't be donated twice.
        masters = jax.tree.unflatten(
            jax.tree.structure(target.master), [jnp.array(p) for p, like in leaves if is_half(like)]
        )
        optimizer_state = target.inner_state if inner is None else _like(target.inner_state, inner)
        inner = target._replace(master=masters, inner_state=optimizer_state)
    else:
        inner = target if inner is None else _like(target, inner)
    return new._replace(params=policy.cast_to_param(params), opt_state=new.opt_state._replace(inner_state=inner))


def is_half(x: Any) -> bool:
    return x.dtype in (jnp.float16, jnp.bfloat16)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _like(target: Any, tree: Any) -> Any:
    """Casts a tree to the dtypes of another."""
    return jax.tree.map(lambda t, x: x.astype(t.dtype), target, tree)
