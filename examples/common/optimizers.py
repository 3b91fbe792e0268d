"""Optimizers and schedules, composed as precision requires: clip, decay, accumulate, masters, loss scale."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from examples.common.cli import UsageError, listing
from examples.common.config import RunConfig


def learning_rate_schedule(flags: RunConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, followed by a cosine decay to zero or by a constant rate, for epochs of `steps` steps."""
    updates = max(1, flags.epochs * steps // flags.accumulate)
    warmup = min(round(flags.warmup_epochs * steps / flags.accumulate), updates // 2)
    if flags.schedule == "constant":
        return optax.warmup_constant_schedule(0.0 if warmup else flags.learning_rate, flags.learning_rate, warmup)
    return optax.warmup_cosine_decay_schedule(0.0, flags.learning_rate, warmup, updates)


def create_optimizer(flags: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Builds the optimizer of the flags, in their precision; `schedule` is a function of the number of updates."""
    policy, loss_scale = mpjax.get_policy(flags.policy), flags.loss_scale
    # The gradients are unscaled at any loss scale. See mpjax.value_and_grad.
    clip = optax.clip_by_global_norm(flags.clip_norm) if flags.clip_norm else optax.identity()
    optimizer: Any = optax.chain(clip, _rule(flags, schedule))
    if flags.freeze:
        # First of all, so that clipping ignores them; and last, so that they do not decay.
        frozen = optax.masked(optax.set_to_zero(), functools.partial(_matching, flags.freeze))
        optimizer = optax.chain(frozen, optimizer, frozen)
    if flags.accumulate > 1:
        # Inside the loss scale, so that a skipped step adds nothing to the sum.
        optimizer = optax.MultiSteps(optimizer, flags.accumulate)
    # Half parameters of a model with float32 outputs (O2) need a float32 copy to accumulate small updates.
    # A policy in half throughout (O3) has none.
    masters = policy.param_dtype != policy.output_dtype
    optimizer = mpjax.master_weights(optimizer, policy) if masters else _in_float32(optimizer)
    if loss_scale is None:
        return mpjax.loss_scale_for(optimizer, policy)
    if loss_scale == "dynamic":
        return mpjax.dynamic_loss_scale(optimizer)
    return mpjax.static_loss_scale(optimizer, float(loss_scale))


def _rule(flags: RunConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    decay = flags.weight_decay
    if flags.optimizer == "adamw":
        return optax.adamw(schedule, weight_decay=decay, mask=_kernels)
    rule = optax.adam(schedule) if flags.optimizer == "adam" else optax.sgd(schedule, flags.momentum, flags.nesterov)
    return optax.chain(optax.add_decayed_weights(decay, mask=_kernels), rule)


def _in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Gives `tx` float32 params, so its state is float32: Adam's squared gradients would underflow in float16."""
    float32: Any = mpjax.get_policy("float32").cast_to_param
    update = lambda updates, state, params=None: tx.update(updates, state, float32(params))  # noqa: E731
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


def update_ema(ema: Any, weights: Any, step: jax.Array, flags: RunConfig, opt_state: Any) -> Any:
    """Updates the exponential moving average of the weights, in float32, if the last step has changed them.

    The decay starts low, at `(1 + step) / (10 + step)`, to forget the random initial weights soon.
    """
    count, changed = step.astype(jnp.float32), jnp.asarray(opt_state.last_finite)
    if flags.accumulate > 1:
        changed &= optax.tree.get(opt_state, "mini_step") == 0
    keep = jnp.minimum(flags.ema, (1 + count) / (10 + count))

    def updated(e: jax.Array, w: jax.Array) -> jax.Array:
        new = keep * e + (1 - keep) * w.astype(jnp.float32) if jnp.issubdtype(w.dtype, jnp.floating) else w
        return jnp.where(changed, new, e)  # not a multiplication by 0, because skipped values may be NaN

    return jax.tree.map(updated, ema, weights)
