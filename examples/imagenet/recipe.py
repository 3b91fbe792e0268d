"""What a training is made of beside its model and precision: the published recipe for ImageNet, one for the digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import mpjax

RecipeName = Literal["digits", "imagenet"]


class Recipe(NamedTuple):
    """Hyperparameters; a flag of the same name replaces each."""

    epochs: int
    batch_size: int
    learning_rate: float  # the peak, of a batch of 256 images where `per_256_images`
    warmup_epochs: float
    momentum: float
    nesterov: bool
    weight_decay: float
    label_smoothing: float
    per_256_images: bool = False


RECIPES: dict[str, Recipe] = {
    "digits": Recipe(40, 64, 0.1, 2.0, 0.9, True, 5e-4, 0.1),
    # ResNet-50 v1.5 of NVIDIA's DeepLearningExamples: https://github.com/NVIDIA/DeepLearningExamples; the linear
    # scaling of its learning rate: Goyal et al., 2017 (https://arxiv.org/abs/1706.02677).
    "imagenet": Recipe(90, 256, 0.256, 5.0, 0.875, False, 1 / 32768, 0.1, per_256_images=True),
}


class Hyperparameters(NamedTuple):
    """A recipe with all flags applied: what the optimizer and the loss are made of."""

    learning_rate: float  # peak
    warmup_steps: int  # in updates, as are the next
    updates: int
    momentum: float
    nesterov: bool
    weight_decay: float
    label_smoothing: float
    mixup: float
    ema: float
    accumulate: int
    clip_norm: float | None


def learning_rate_schedule(hyper: Hyperparameters) -> optax.Schedule:
    """Linear warm-up and a cosine down to zero."""
    warmup = min(hyper.warmup_steps, hyper.updates // 2)
    return optax.warmup_cosine_decay_schedule(0.0, hyper.learning_rate, warmup, hyper.updates)


def create_optimizer(
    hyper: Hyperparameters, schedule: optax.Schedule, policy: mpjax.Policy, loss_scale: str | None
) -> optax.GradientTransformationExtraArgs:
    """SGD with all around it, in the order that precision needs: clip, decay, accumulate, masters, loss scale.

    Args:
        hyper: the hyperparameters.
        schedule: of the learning rate, over updates.
        policy: the precision.
        loss_scale: "dynamic", a number, or None for what the policy needs.
    """
    optimizer: Any = optax.chain(
        # True gradients come in, whatever the loss scale: see mpjax.value_and_grad.
        optax.clip_by_global_norm(hyper.clip_norm) if hyper.clip_norm else optax.identity(),
        optax.add_decayed_weights(hyper.weight_decay, mask=_kernels),
        # Gradients are float32 under every policy, so their running mean is too.
        optax.sgd(schedule, momentum=hyper.momentum, nesterov=hyper.nesterov, accumulator_dtype=jnp.float32),
    )
    if hyper.accumulate > 1:
        # Inside the loss scale: a step that is skipped adds nothing to the sum.
        optimizer = optax.MultiSteps(optimizer, hyper.accumulate)
    if policy.param_dtype != policy.output_dtype:
        # Half params under a float32 model (O2) need a float32 copy that small updates can add up in;
        # a policy that is half throughout (O3) asks to do without.
        optimizer = mpjax.master_weights(optimizer, policy)
    if loss_scale is None:
        return mpjax.loss_scale_for(policy, optimizer)
    if loss_scale == "dynamic":
        return mpjax.dynamic_loss_scale(optimizer)
    return mpjax.static_loss_scale(optimizer, float(loss_scale))


def _kernels(params: Any) -> Any:
    """Weight decay is for kernels: on biases and normalisation it would only fight the data."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def is_update(opt_state: Any, accumulate: int) -> jax.Array:
    """Whether the last step changed the parameters: neither skipped nor one that only accumulated."""
    finite = jnp.asarray(opt_state.last_finite)
    if accumulate == 1:
        return finite
    return finite & (optax.tree.get(opt_state, "mini_step") == 0)


def update_ema(ema: Any, weights: Any, step: jax.Array, decay: float, changed: jax.Array) -> Any:
    """The exponential moving average of the weights, in float32; kept as it is where they have not changed.

    The decay starts low, `(1 + step) / (10 + step)`, so that the random weights of the start are forgotten soon.
    """
    count = step.astype(jnp.float32)
    keep = jnp.minimum(decay, (1 + count) / (10 + count))
    # `where`, never a multiplication by 0: what was skipped may hold NaN.
    return jax.tree.map(lambda e, w: jnp.where(changed, keep * e + (1 - keep) * w.astype(jnp.float32), e), ema, weights)


def mix_up(key: jax.Array, alpha: float, batch_size: int) -> Callable[[jax.Array], jax.Array]:
    """A function that blends each entry of a batch with another (Zhang et al., 2017, https://arxiv.org/abs/1710.09412).

    Args:
        key: of the random numbers.
        alpha: of the Beta distribution that the one weight of the batch is drawn from; 0 blends nothing.
        batch_size: entries.

    Returns:
        A function of arrays [batch_size, ...], to be called for images and for targets.
    """
    if not alpha:
        return lambda x: x
    draw, permute = jax.random.split(key)
    weight = jax.random.beta(draw, alpha, alpha)
    others = jax.random.permutation(permute, batch_size)
    return lambda x: weight * x + (1 - weight) * x[others]
