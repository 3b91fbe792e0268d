"""Optimizers and schedules, composed as precision requires: clip, decay, accumulate, masters, loss scale."""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpjax
from examples.common.cli import UsageError, listing


class Recipe(NamedTuple):
    """Recipe: the defaults of a script, each of which a flag of the same name overrides."""

    epochs: int
    batch_size: int
    learning_rate: float  # the peak; per 256 entries of a batch if `per_256`
    warmup_epochs: float
    optimizer: str
    weight_decay: float
    momentum: float = 0.9
    nesterov: bool = False
    clip_norm: float | None = None
    label_smoothing: float = 0.0
    schedule: str = "cosine"
    per_256: bool = False
    freeze: str | None = None
    ema: float = 0.0
    accumulate: int = 1
    warmup_updates: int = 0  # these two follow from the epochs
    updates: int = 1


def learning_rate_schedule(hyper: Recipe) -> optax.Schedule:
    """Linear warm-up, followed by a cosine decay to zero or by a constant rate."""
    warmup = min(hyper.warmup_updates, hyper.updates // 2)
    if hyper.schedule == "constant":
        return optax.warmup_constant_schedule(0.0 if warmup else hyper.learning_rate, hyper.learning_rate, warmup)
    return optax.warmup_cosine_decay_schedule(0.0, hyper.learning_rate, warmup, hyper.updates)


def create_optimizer(
    hyper: Recipe, schedule: optax.Schedule, policy: mpjax.Policy, loss_scale: str | None
) -> optax.GradientTransformationExtraArgs:
    """Builds an optimizer for a precision policy.

    Args:
        hyper: The hyperparameters.
        schedule: Learning rate as a function of the number of updates.
        policy: The precision.
        loss_scale: "dynamic", a number, or None for the default of the policy.
    """
    optimizer: Any = optax.chain(
        # The gradients are unscaled at any loss scale. See mpjax.value_and_grad.
        optax.clip_by_global_norm(hyper.clip_norm) if hyper.clip_norm else optax.identity(),
        _rule(hyper, schedule),
    )
    if hyper.freeze:
        # First of all, so that clipping ignores them; and last, so that they do not decay.
        frozen = optax.masked(optax.set_to_zero(), functools.partial(_matching, hyper.freeze))
        optimizer = optax.chain(frozen, optimizer, frozen)
    if hyper.accumulate > 1:
        # Inside the loss scale, so that a skipped step adds nothing to the sum.
        optimizer = optax.MultiSteps(optimizer, hyper.accumulate)
    if policy.param_dtype != policy.output_dtype:
        # Half parameters of a model with float32 outputs (O2) need a float32 copy to accumulate small updates.
        # A policy in half throughout (O3) has none.
        optimizer = mpjax.master_weights(optimizer, policy)
    else:
        optimizer = _in_float32(optimizer)
    if loss_scale is None:
        return mpjax.loss_scale_for(optimizer, policy)
    if loss_scale == "dynamic":
        return mpjax.dynamic_loss_scale(optimizer)
    return mpjax.static_loss_scale(optimizer, float(loss_scale))


def _rule(hyper: Recipe, schedule: optax.Schedule) -> optax.GradientTransformation:
    decay = hyper.weight_decay
    if hyper.optimizer == "adamw":
        return optax.adamw(schedule, weight_decay=decay, mask=_kernels)
    rule = optax.adam(schedule) if hyper.optimizer == "adam" else optax.sgd(schedule, hyper.momentum, hyper.nesterov)
    return optax.chain(optax.add_decayed_weights(decay, mask=_kernels), rule)


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Gives `tx` float32 params, so its state is float32: Adam's squared gradients would underflow in float16."""

    def float32(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tx.update(updates, state, None if params is None else float32(params))

    return optax.GradientTransformation(lambda params: tx.init(float32(params)), update)


def _kernels(params: Any) -> Any:
    """The mask for weight decay: kernels, but not biases and normalisation."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _matching(pattern: str, params: Any) -> Any:
    """The mask of --freeze: whether the path of a parameter contains a match."""
    path_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    mask = jax.tree_util.tree_map_with_path(lambda path, _: re.search(pattern, path_of(path)) is not None, params)
    if not any(jax.tree.leaves(mask)):
        names = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        raise UsageError(f"--freeze {pattern!r} matches no parameter; some are {listing(names)}.")
    return mask


def update_ema(ema: Any, weights: Any, step: jax.Array, hyper: Recipe, opt_state: Any) -> Any:
    """Updates the exponential moving average of the weights, in float32, if the last step has changed them.

    The decay starts low, at `(1 + step) / (10 + step)`, to forget the random initial weights soon.
    """
    count, changed = step.astype(jnp.float32), jnp.asarray(opt_state.last_finite)
    if hyper.accumulate > 1:
        changed &= optax.tree.get(opt_state, "mini_step") == 0
    keep = jnp.minimum(hyper.ema, (1 + count) / (10 + count))

    def updated(e: jax.Array, w: jax.Array) -> jax.Array:
        new = keep * e + (1 - keep) * w.astype(jnp.float32) if jnp.issubdtype(w.dtype, jnp.floating) else w
        return jnp.where(changed, new, e)  # not a multiplication by 0, because skipped values may be NaN

    return jax.tree.map(updated, ema, weights)
