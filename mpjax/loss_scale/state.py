"""The state of loss scaling: its fields, how to find it in an optimizer state, and the progress check."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

from mpjax.program.objects import held
from mpjax.program.source import user_stacklevel

_CAUSES = {
    "loss": "the loss itself was inf or NaN in the last {losses} of them, an overflow of the forward pass, so the loss "
    "scale is not at fault and was kept. Either training has diverged (lower the learning rate, clip gradients), or "
    "the data hold inf or NaN, or an activation leaves float16's range (65504): keep that module in float32 by a "
    "policy override, or use mixed_bfloat16.",
    "gradients": "the gradients are inf or NaN although a scale of {scale:g} does not enlarge them, so it is not at "
    "fault (unless value_and_grad reads another state, whose scale stays: that of another optimizer, or one that a "
    "jitted function closes over in place of an argument). Training has diverged, or an activation leaves float16's "
    "range (65504), or a derivative is infinite (sqrt or norm at 0, log of 0, 0/0). Run the step in float32; if that "
    "fails too, look at the model and the data. (If the loop passes value=loss to update, a non-finite loss is "
    "reported separately.)",
    "scale": "the gradients overflow at this scale, which still enlarges them: the scale is too high, which does not "
    "mean that training has diverged. Lower init_scale (or the static scale), use dynamic_loss_scale, lower hysteresis "
    "or min_scale, or allow more with max_consecutive_skips.",
}
_WHERE = (
    "To find the operation, print(mpjax.find_nonfinite(train_step, params, opt_state, batch)) with the arguments of a "
    "skipped step."
)


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale` and `static_loss_scale`. The dtypes are fixed from `init` on.

    Attributes:
        loss_scale: The factor of the backward pass, a float32 scalar; always positive and finite.
        good_steps: Consecutive finite steps since the scale last changed, an int32 scalar.
        skipped_steps: All skipped steps, an int32 scalar, saturating.
        consecutive_skips: The current number of consecutive skipped steps, an int32 scalar.
        last_finite: Whether the last step was taken, a bool scalar.
        inner_state: The state of the wrapped transformation.
        nonfinite_losses: Steps that were skipped because the loss itself was not finite (reported by
            `update(..., value=loss)`), an int32 scalar, saturating.
        consecutive_nonfinite_losses: The current number of consecutive such steps, an int32 scalar.

    Source: Mixed Precision Training, Micikevicius et al. 2018 (https://arxiv.org/abs/1710.03740).
    """

    loss_scale: chex.Array
    good_steps: chex.Array
    skipped_steps: chex.Array
    consecutive_skips: chex.Array
    last_finite: chex.Array
    inner_state: Any
    nonfinite_losses: chex.Array
    consecutive_nonfinite_losses: chex.Array

    def __getattribute__(self, name: str) -> Any:
        # An `nnx.Optimizer` holds Variables in place of arrays, which do not format as numbers.
        value = tuple.__getattribute__(self, name)
        return value.get_value() if name in _NUMBERS and hasattr(value, "get_value") else value


_NUMBERS = frozenset(LossScaleState._fields) - {"inner_state"}


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


def warn(message: str) -> None:
    """Warns about the user's line."""
    warnings.warn(f"loss scaling: {message}", LossScaleWarning, stacklevel=user_stacklevel())


def find_loss_scale_state(opt_state: Any) -> LossScaleState:
    """Finds the `LossScaleState` in an optimizer state, a `TrainState` or an `nnx.Optimizer`.

    Raises:
        ValueError: It holds none, or more than one.

    Warns:
        LossScaleWarning: a transformation wrapped around loss scaling hides overflows from it.
    """
    tree = getattr(opt_state, "opt_state", opt_state)
    found: list[LossScaleState] = held(tree, _is_state)
    if len(found) == 1:
        check_wiring(tree)
        return found[0]
    if not found:
        if isinstance(tree, optax.GradientTransformation) or callable(getattr(tree, "init", None)):
            raise ValueError(
                f"opt_state is a {type(tree).__name__}, the optimizer itself: give its state, opt_state = "
                "tx.init(params), or the one that its last update returned."
            )
        if isinstance(tree, (str, jmp.Policy)):
            raise ValueError(f"opt_state={tree!r} is a policy: give it by its name, policy={tree!r}.")
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
    return bool(held(tree, _is_state))


# The warning about a transformation around loss scaling, by the type of its state.
_AROUND = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite skips non-finite steps before the loss scale sees them, so the scale never backs "
        "off. Drop apply_if_finite: dynamic_loss_scale skips such steps itself."
    ),
    optax.MultiStepsState: (
        "optax.MultiSteps accumulates gradients before the loss scale checks them, so one NaN stays in its "
        "accumulator. Write dynamic_loss_scale(optax.MultiSteps(tx, k))."
    ),
}
_IN_FRONT = (
    "a transformation in front of it in an optax.chain gets the gradients first. optax.clip turns an inf into a "
    "number, and optax.zero_nans a NaN into zero: the overflow is hidden, the step is taken, and the scale never backs "
    "off. Wrap the whole chain: dynamic_loss_scale(optax.chain(optax.clip(1.0), tx))."
)
_BEHIND = (
    "a transformation behind it in an optax.chain also runs on a skipped step, where weight decay still changes the "
    "params and a schedule still counts. Wrap the whole chain: "
    "dynamic_loss_scale(optax.chain(tx, optax.add_decayed_weights(1e-4)))."
)
_ONE_GROUP = (
    "it wraps one group of optax.masked or optax.multi_transform. An overflow in the gradients of another group is not "
    "seen, and skips no step. Wrap all groups: dynamic_loss_scale(optax.multi_transform(...))."
)
_AFTER_ROUNDING = (
    "{name} is followed by another transformation in an optax.chain, which changes updates that lead exactly to the "
    "rounded params. Wrap the whole chain: "
    "{name}(optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(1e-3)))."
)


def check_wiring(opt_state: Any) -> None:
    """Warns where the positions of states show that transformations are in an order that breaks them."""
    for message in dict.fromkeys(_miswirings(opt_state)):
        warn(message)


def _miswirings(node: Any) -> Iterator[str]:
    children = [x for x in jax.tree.leaves(node, is_leaf=lambda x: x is not node) if not hasattr(x, "dtype")]
    is_around = not _is_state(node) and contains_state(node)
    if is_around and type(node) in _AROUND:
        yield _AROUND[type(node)]
    if is_around and isinstance(node, (optax.MaskedState, optax.PartitionState)):
        groups = node.inner_states.values() if isinstance(node, optax.PartitionState) else ()
        # A group whose whole state is empty is frozen (optax.set_to_zero).
        others = [g for g in groups if not contains_state(g) and g.inner_state != optax.EmptyState()]
        if others or isinstance(node, optax.MaskedState):
            yield _ONE_GROUP
        if isinstance(node, optax.PartitionState):
            children = [group.inner_state for group in groups]
    # The states of a chain, in its order.
    if type(node) in (tuple, collections.OrderedDict) and all(isinstance(x, (tuple, dict)) for x in children):
        for i, child in enumerate(children):
            if contains_state(child):
                yield from [_IN_FRONT] * (i > 0) + [_BEHIND] * (i < len(children) - 1)
            elif i < len(children) - 1:
                yield from (_AFTER_ROUNDING.format(name=name) for name in roundings(child))
    for child in children:
        if isinstance(child, (tuple, collections.OrderedDict)):  # not into params and moments
            yield from _miswirings(child)


def roundings(state: Any) -> list[str]:
    """The names of the transformations in a state that make up for the rounding of half params, by `rounds_params`."""
    return [x.rounds_params for x in held(state, lambda x: hasattr(x, "rounds_params"))]


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
        TypeError: It is called inside of a `jit`.
    """
    state = find_loss_scale_state(opt_state)
    if isinstance(state.consecutive_skips, jax.core.Tracer):
        raise TypeError("check_progress reads numbers: call it outside of jit, on the state that the step returned.")
    skips = int(np.max(state.consecutive_skips))
    if skips <= max_consecutive_skips:
        return
    scale = float(np.min(state.loss_scale))
    bad_losses = int(np.max(state.consecutive_nonfinite_losses))
    head = f"the last {skips} steps were skipped (loss scale {scale:g}, {int(np.max(state.skipped_steps))} in all): "
    cause: Literal["loss", "gradients", "scale"] = "loss" if bad_losses else "gradients" if scale <= 1.0 else "scale"
    raise LossScaleError(f"{head}{_CAUSES[cause].format(losses=bad_losses, scale=scale)} {_WHERE}", cause)
