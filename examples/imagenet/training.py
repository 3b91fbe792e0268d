"""The model, the optimizer and the two jitted steps; what is about precision is in `mpjax.` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from examples.imagenet.config import Config
from examples.imagenet.data import Array, Batch, Dataset
from examples.imagenet.models import create_model


class Totals(NamedTuple):
    """Sums over images, kept on the device so that no step waits for the host."""

    loss: jax.Array  # shape=(), dtype=float32
    correct: jax.Array  # shape=(), dtype=float32
    images: jax.Array  # shape=(), dtype=float32

    @classmethod
    def zero(cls) -> Totals:
        # Three arrays: one zero in all places would be one buffer, which can not be donated thrice.
        return cls(*(jnp.zeros(()) for _ in cls._fields))

    def add(self, losses: Array, logits: Array, labels: Array, mask: Array) -> Totals:
        # An overflowed image has no loss; one of them must not blot out the mean of an epoch.
        mask = jnp.where(jnp.isfinite(losses), mask, 0)
        correct = (jnp.argmax(logits, axis=-1) == labels) * mask
        return Totals(
            self.loss + jnp.sum(jnp.where(mask > 0, losses, 0)),
            self.correct + jnp.sum(correct),
            self.images + jnp.sum(mask),
        )

    def means(self) -> tuple[float, float]:
        """Mean loss and accuracy, on the host; NaN where no image counted."""
        loss, correct, images = (float(x) for x in jax.device_get(self))
        return (loss / images, correct / images) if images else (float("nan"), float("nan"))


class TrainState(NamedTuple):
    """All that a step changes, and so all that a checkpoint holds."""

    step: jax.Array  # shape=(), dtype=int32
    params: Any
    batch_stats: Any
    opt_state: Any
    totals: Totals  # of the epoch so far


class Training(NamedTuple):
    """A training set-up: pure functions, and the state that they start from."""

    state: TrainState
    train_step: jax.stages.Wrapped  # (TrainState, Batch) -> (TrainState, what the bar shows)
    test_step: jax.stages.Wrapped  # (TrainState, Totals, Batch) -> Totals
    learning_rate: optax.Schedule


def create_training(config: Config, dataset: Dataset, steps: int) -> Training:
    """Builds model, optimizer and steps.

    Args:
        config: the flags.
        dataset: the training images; it gives the shape of an image and the classes.
        steps: optimizer steps in the whole run, which the learning rate's schedule spans.
    """
    policy = mpjax.get_policy(config.policy)
    model = mpjax.with_policy(create_model(config.model_name, len(dataset.classes)), policy)
    schedule = _schedule(config, dataset, steps)
    tx = mpjax.loss_scale_for(policy, _optimizer(config, schedule, policy))

    images = jnp.zeros((1, *dataset.image_shape))
    # Runs once, and optimising its random numbers would take longer than all the rest of the start.
    init = jax.jit(model.init, compiler_options={"xla_backend_optimization_level": 0})
    variables = init(jax.random.key(config.seed), images)
    params = policy.cast_to_param(variables["params"])
    state = TrainState(jnp.zeros((), jnp.int32), params, variables["batch_stats"], tx.init(params), Totals.zero())

    prepare = _normaliser(dataset.mean, dataset.std)
    train_step = _train_step(model, tx, prepare, config.label_smoothing)
    test_step = _test_step(model, prepare)
    return Training(
        state,
        jax.jit(train_step, donate_argnums=0),
        jax.jit(test_step, donate_argnums=1),
        schedule,
    )


def _schedule(config: Config, dataset: Dataset, steps: int) -> optax.Schedule:
    warmup = min(round(config.warmup_epochs * (len(dataset) // config.batch_size)), steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, steps)


def _optimizer(config: Config, schedule: optax.Schedule, policy: mpjax.Policy) -> optax.GradientTransformation:
    optimizer = optax.chain(
        optax.add_decayed_weights(config.weight_decay, mask=_kernels),
        # Gradients are float32 under every policy, so their running mean is too.
        optax.sgd(schedule, momentum=config.momentum, nesterov=True, accumulator_dtype=jnp.float32),
    )
    if policy.param_dtype == policy.output_dtype:
        return optimizer
    # Half params under a float32 model (O2) need a float32 copy that small updates can add up in;
    # a policy that is half throughout (O3) asks to do without.
    return mpjax.master_weights(optimizer, policy)


def _kernels(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _normaliser(mean: Sequence[float], std: Sequence[float]) -> Callable[[Array], jax.Array]:
    # On the device: bytes are a quarter of what floats would take on the way there.
    means, stds = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    return lambda images: (jnp.asarray(images, jnp.float32) / 255 - means) / stds


def _losses(logits: Array, labels: Array, smoothing: float = 0.0) -> jax.Array:
    # In float32 also where the policy's output is half: the log-sum-exp needs the mantissa.
    logits = logits.astype(jnp.float32)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(logits, targets)


def _train_step(
    model: nn.Module,
    tx: optax.GradientTransformation,
    prepare: Callable[[Array], jax.Array],
    smoothing: float,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = model.apply(variables, prepare(batch.images), train=True, mutable=["batch_stats"])
            losses = _losses(logits, batch.labels, smoothing)
            return jnp.mean(losses), (losses, logits, new["batch_stats"])

        value_and_grad = mpjax.value_and_grad(loss_fn, state.opt_state, has_aux=True)
        (loss, (losses, logits, batch_stats)), grads = value_and_grad(state.params)
        params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=loss)
        batch_stats = mpjax.keep_if_finite(opt_state, batch_stats, state.batch_stats)
        totals = state.totals.add(losses, logits, batch.labels, batch.mask)
        shown = {
            "totals": totals,
            "loss_scale": opt_state.loss_scale,
            "skipped_steps": opt_state.skipped_steps,
            "consecutive_skips": opt_state.consecutive_skips,
        }
        return TrainState(state.step + 1, params, batch_stats, opt_state, totals), shown

    return train_step


def _test_step(
    model: nn.Module, prepare: Callable[[Array], jax.Array]
) -> Callable[[TrainState, Totals, Batch], Totals]:
    def test_step(state: TrainState, totals: Totals, batch: Batch) -> Totals:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits: Any = model.apply(variables, prepare(batch.images), train=False)
        return totals.add(_losses(logits, batch.labels), logits, batch.labels, batch.mask)

    return test_step
