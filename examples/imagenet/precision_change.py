"""A training state of one precision as that of another, so that a run can go on in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from examples.imagenet.training import TrainState


def float32_params(state: TrainState) -> Any:
    """The parameters as exactly as the state has them: the masters where there are any."""
    inner = state.opt_state.inner_state
    master = inner.master if isinstance(inner, mpjax.MasterWeightsState) else None
    if master is None:
        return jax.tree.map(lambda p: p.astype(jnp.float32), state.params)
    # A leaf without a master is float32 already, and in its place is a node without leaves.
    empty = lambda x: not isinstance(x, jax.Array)  # noqa: E731
    leaves = jax.tree.leaves(master, is_leaf=empty)
    params, treedef = jax.tree.flatten(state.params)
    return jax.tree.unflatten(treedef, [p if empty(m) else m for p, m in zip(params, leaves, strict=True)])


def change_precision(old: TrainState, new: TrainState, policy: mpjax.Policy) -> TrainState:
    """The state `old` in the form of `new`.

    Parameters (through their float32 masters), batch statistics, EMA, the optimizer's momentum and counts, and the
    count of skipped steps carry over. The loss scale and its count of good steps are those that the new precision
    starts with: a scale that was found for float16 says nothing about bfloat16.

    Args:
        old: as restored.
        new: as initialised in the new precision; its numbers do not matter but for the loss scale.
        policy: the new one.
    """
    params = float32_params(old)
    inner, target = old.opt_state.inner_state, new.opt_state.inner_state
    if isinstance(inner, mpjax.MasterWeightsState):
        inner = inner.inner_state
    if isinstance(target, mpjax.MasterWeightsState):
        masters = jax.tree.unflatten(
            jax.tree.structure(target.master),
            [p for p, like in zip(jax.tree.leaves(params), jax.tree.leaves(new.params), strict=True) if is_half(like)],
        )
        inner = target._replace(master=masters, inner_state=_like(target.inner_state, inner))
    else:
        inner = _like(target, inner)
    return old._replace(
        params=policy.cast_to_param(params),
        opt_state=old.opt_state._replace(
            inner_state=inner,
            loss_scale=new.opt_state.loss_scale,
            good_steps=new.opt_state.good_steps,
            consecutive_skips=new.opt_state.consecutive_skips,
        ),
    )


def is_half(x: Any) -> bool:
    return x.dtype in (jnp.float16, jnp.bfloat16)


def _like(target: Any, tree: Any) -> Any:
    """The numbers of a tree in the dtypes of another."""
    return jax.tree.map(lambda t, x: x.astype(t.dtype), target, tree)
