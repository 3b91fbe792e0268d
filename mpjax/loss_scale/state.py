"""The state of loss scaling: its fields, how to find it in an optimizer state, and the progress check."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

_WHERE = (
    "To find the operation, print(mpjax.find_nonfinite(train_step, params, opt_state, batch)) with the arguments of a "
    "skipped step."
)


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`. The dtypes are fixed from `init` on.

    Source: Mixed Precision Training, Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740).
    """

    loss_scale: chex.Array  # shape=(), dtype=jnp.float32; always positive and finite.
    good_steps: chex.Array  # shape=(), dtype=jnp.int32; consecutive finite steps since the last change.
    skipped_steps: chex.Array  # shape=(), dtype=jnp.int32; total skipped steps, saturating.
    consecutive_skips: chex.Array  # shape=(), dtype=jnp.int32; current number of consecutive skipped steps.
    last_finite: chex.Array  # shape=(), dtype=jnp.bool_; whether the last step was taken.
    inner_state: Any  # the wrapped transformation's state.
    # Steps skipped because the loss itself was not finite (reported by `update(..., value=loss)`).
    nonfinite_losses: chex.Array  # shape=(), dtype=jnp.int32; total, saturating.
    consecutive_nonfinite_losses: chex.Array  # shape=(), dtype=jnp.int32; current consecutive number.


class LossScaleError(RuntimeError):
    """Training makes no progress: too many consecutive steps were skipped.

    Attributes:
        cause: `"loss"`: the loss itself was not finite (forward overflow, divergence, bad data).
            `"gradients"`: the gradients are not finite although the scale no longer enlarges them.
            `"scale"`: the loss scale is still too high; training has not diverged.
    """

    def __init__(self, message: str, cause: Literal["loss", "gradients", "scale"]):
        super().__init__(message)
        self.cause = cause


class LossScaleWarning(UserWarning):
    """An optimizer is wrapped in a way that breaks loss scaling or loses small updates."""


def find_loss_scale_state(opt_state: Any) -> LossScaleState:
    """Finds the `LossScaleState` in an optimizer state, a `TrainState` or an `nnx.Optimizer`.

    Raises:
        ValueError: It holds none, or more than one.

    Warns:
        LossScaleWarning: a transformation wrapped around loss scaling hides overflows from it.
    """
    tree = getattr(opt_state, "opt_state", opt_state)
    leaves = jax.tree.leaves(tree, is_leaf=_is_state)
    found = [leaf for leaf in leaves if isinstance(leaf, LossScaleState)]
    if len(found) == 1:
        warn_if_overflows_are_hidden(tree)
        return found[0]
    if not found:
        raise ValueError(
            f"found no LossScaleState in the given {type(tree).__name__}: wrap the optimizer with "
            "mpjax.dynamic_loss_scale or mpjax.static_loss_scale (mpjax.loss_scale_for chooses by policy) and "
            "pass the state that its init or last update returned."
        )
    raise ValueError(
        f"found {len(found)} LossScaleStates in the given {type(tree).__name__}, so it is unclear which one scales "
        "this loss. Pass that one itself, or wrap the whole optimizer once."
    )


def _is_state(x: Any) -> bool:
    return isinstance(x, LossScaleState)


def contains_state(tree: Any) -> bool:
    """Whether there is a `LossScaleState` at any depth of a tree."""
    return any(map(_is_state, jax.tree.leaves(tree, is_leaf=_is_state)))


# The warning about a wrapper around loss scaling, by the type of the wrapper's state.
_HIDING = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite skips non-finite steps before the loss scale sees them, so the scale never backs "
        "off. Drop apply_if_finite: dynamic_loss_scale skips such steps itself."
    ),
    optax.MultiStepsState: (
        "optax.MultiSteps accumulates gradients before the loss scale checks them, so one NaN stays in its "
        "accumulator. Write dynamic_loss_scale(optax.MultiSteps(tx, k))."
    ),
    optax.ZeroNansState: (
        "optax.zero_nans in front of loss scaling replaces the NaNs that show an overflow, so the scale never backs "
        "off and zeros are used as gradients. Drop zero_nans, or put it inside: "
        "dynamic_loss_scale(optax.chain(optax.zero_nans(), tx))."
    ),
}


def warn_if_overflows_are_hidden(opt_state: Any) -> None:
    """Warns about transformations around loss scaling that hide overflows from it."""
    for kind in _hiding(opt_state):
        warnings.warn(f"loss scaling: {_HIDING[kind]}", LossScaleWarning, stacklevel=5)


def _hiding(node: Any) -> Iterator[type]:
    """The types in `_HIDING` whose transformation sees the gradients before loss scaling does."""
    if _is_state(node) or not contains_state(node):
        return
    if type(node) in _HIDING:
        yield type(node)
    for child in _children(node):
        if contains_state(child):
            yield from _hiding(child)
            return
        # A chain's states are in the order in which its transformations run.
        leaves = jax.tree.leaves(child, is_leaf=lambda x: isinstance(x, optax.ZeroNansState))
        if any(isinstance(leaf, optax.ZeroNansState) for leaf in leaves):
            yield optax.ZeroNansState


def _children(node: Any) -> list[Any]:
    return jax.tree.leaves(node, is_leaf=lambda x: x is not node)


def loss_scale_of(opt_state: Any) -> jax.Array:
    """The current loss scale, float32."""
    return jnp.asarray(find_loss_scale_state(opt_state).loss_scale)


def check_progress(opt_state: Any, max_consecutive_skips: int = 50) -> None:
    """Raises if too many consecutive steps were skipped. Call it on the host, for example once per epoch.

    The default leaves a dynamic scale time to fall from its maximum to its minimum (38 halvings).

    Args:
        opt_state: Optimizer state with concrete arrays. With several replicas the worst one counts.
        max_consecutive_skips: Number of consecutive skipped steps that are tolerated.

    Raises:
        LossScaleError: More steps were skipped. Its text and `cause` tell divergence from a scale that is too high.
        ValueError: No (or more than one) `LossScaleState` in `opt_state`.
    """
    state = find_loss_scale_state(opt_state)
    skips = int(np.max(state.consecutive_skips))
    if skips <= max_consecutive_skips:
        return
    scale = float(np.min(state.loss_scale))
    bad_losses = int(np.max(state.consecutive_nonfinite_losses))
    head = f"the last {skips} steps were skipped (loss scale {scale:g}, {int(np.max(state.skipped_steps))} in all): "
    if bad_losses:
        raise LossScaleError(
            f"{head}the loss itself was inf or NaN in the last {bad_losses} of them, an overflow of the forward "
            "pass, so the loss scale is not at fault and was kept. Either training has diverged (lower the learning "
            "rate, clip gradients), or the data hold inf or NaN, or an activation leaves float16's range "
            "(65504): keep that module in float32 by a policy override, or use mixed_bfloat16. "
            f"{_WHERE}",
            "loss",
        )
    if scale <= 1.0:
        raise LossScaleError(
            f"{head}the gradients are inf or NaN although a scale of {scale:g} does not enlarge them: the backward "
            "pass itself makes them. Training has diverged, or a derivative is infinite (sqrt or norm at 0, "
            "log of 0, 0/0). Run the step in float32; if that fails too, look at the model and the data. "
            f"(If the loop passes value=loss to update, a non-finite loss is reported separately.) {_WHERE}",
            "gradients",
        )
    raise LossScaleError(
        f"{head}the gradients overflow at this scale, which still enlarges them: the scale is too high, "
        "which does not mean that training has diverged. "
        "Lower init_scale (or the static scale), use dynamic_loss_scale, lower hysteresis or min_scale, or allow more "
        f"with max_consecutive_skips. {_WHERE}",
        "scale",
    )
