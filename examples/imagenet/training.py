"""The training state and the jitted steps; what is about precision is in `mpjax.` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from examples.common.devices import DataParallel
from examples.imagenet.config import Config
from examples.imagenet.data import Array, Batch, Dataset
from examples.imagenet.models import Variables, create_model
from examples.imagenet.recipe import (
    Hyperparameters,
    create_optimizer,
    is_update,
    learning_rate_schedule,
    mix_up,
    update_ema,
)


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
    ema: Any  # the variables' moving average, float32; empty without --ema


class Training(NamedTuple):
    """A training set-up: pure functions, jitted."""

    policy: mpjax.Policy
    init: jax.stages.Wrapped  # (key) -> TrainState
    train_step: jax.stages.Wrapped  # (TrainState, Batch) -> (TrainState, what the bar shows)
    test_step: jax.stages.Wrapped  # (Variables, Totals, Batch) -> Totals
    predict_step: jax.stages.Wrapped  # (Variables, images) -> probabilities
    learning_rate: optax.Schedule

    def weights(self, state: TrainState) -> Variables:
        """What the model is tested and used with."""
        if not state.ema:
            return {"params": state.params, "batch_stats": state.batch_stats}
        return state.ema | {"params": self.policy.cast_to_param(state.ema["params"])}


def create_training(
    config: Config, dataset: Dataset, hyper: Hyperparameters, parallel: DataParallel | None = None
) -> Training:
    """Builds model, optimizer and steps.

    Args:
        config: the flags.
        dataset: the training images; it gives the shape of an image and the classes.
        hyper: the recipe with all flags applied.
        parallel: where the state is to live; by default where JAX puts it.
    """
    policy = mpjax.get_policy(config.policy)
    channels = dataset.image_shape[-1]
    module_policy = policy if config.amp == "module" else None
    model = create_model(config.model_name, len(dataset.classes), channels, module_policy)
    # One program for training and one for testing, so that autocast sees `train` as the constant it is.
    apply: dict[bool, Callable[..., Any]] = {}
    for train in (False, True):

        def forward(variables: Variables, images: jax.Array, train: bool = train) -> tuple[jax.Array, Any]:
            return model.apply(variables, images, train)

        apply[train] = mpjax.autocast(forward, policy) if config.amp == "autocast" else forward

    schedule = learning_rate_schedule(hyper)
    tx = create_optimizer(hyper, schedule, policy, config.loss_scale)

    def init(key: jax.Array) -> TrainState:
        variables = model.init(key, jnp.zeros((1, *dataset.image_shape)))
        params, batch_stats = policy.cast_to_param(variables["params"]), variables["batch_stats"]
        # In arrays of its own: the step donates both.
        ema = jax.tree.map(lambda x: x + 0, variables) if hyper.ema else {}
        return TrainState(jnp.zeros((), jnp.int32), params, batch_stats, tx.init(params), Totals.zero(), ema)

    prepare = _normaliser(dataset.mean, dataset.std)
    return Training(
        policy,
        # Runs once, and optimising its random numbers would take longer than all the rest of the start.
        jax.jit(
            init,
            out_shardings=None if parallel is None else parallel.replicated,
            compiler_options={"xla_backend_optimization_level": 0},
        ),
        jax.jit(_train_step(apply[True], tx, prepare, hyper, config.seed), donate_argnums=0),
        jax.jit(_test_step(apply[False], prepare), donate_argnums=1),
        jax.jit(_predict_step(apply[False], prepare)),
        schedule,
    )


def _normaliser(mean: Sequence[float], std: Sequence[float]) -> Callable[[Array], jax.Array]:
    # On the device: bytes are a quarter of what floats would take on the way there.
    means, stds = np.asarray(mean, np.float32), np.asarray(std, np.float32)
    return lambda images: (jnp.asarray(images, jnp.float32) / 255 - means) / stds


def _losses(logits: Array, targets: Array) -> jax.Array:
    # In float32 also where the policy's output is half: the log-sum-exp needs the mantissa.
    return optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)


def _train_step(
    apply: Callable[..., Any],
    tx: optax.GradientTransformation,
    prepare: Callable[[Array], jax.Array],
    hyper: Hyperparameters,
    seed: int,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        blend = mix_up(key, hyper.mixup, len(batch.labels))
        images = blend(prepare(batch.images))

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, batch_stats = apply(variables, images)
            targets = optax.smooth_labels(jax.nn.one_hot(batch.labels, logits.shape[-1]), hyper.label_smoothing)
            losses = _losses(logits, blend(targets))
            return jnp.mean(losses), (losses, logits, batch_stats)

        value_and_grad = mpjax.value_and_grad(loss_fn, state.opt_state, has_aux=True)
        (loss, (losses, logits, batch_stats)), grads = value_and_grad(state.params)
        params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=loss)
        batch_stats = mpjax.keep_if_finite(opt_state, batch_stats, state.batch_stats)
        ema = state.ema
        if hyper.ema:
            changed = is_update(opt_state, hyper.accumulate)
            variables = {"params": params, "batch_stats": batch_stats}
            ema = update_ema(ema, variables, state.step, hyper.ema, changed)
        totals = state.totals.add(losses, logits, batch.labels, batch.mask)
        shown = {
            "totals": totals,
            "loss_scale": opt_state.loss_scale,
            "skipped_steps": opt_state.skipped_steps,
            "consecutive_skips": opt_state.consecutive_skips,
        }
        return TrainState(state.step + 1, params, batch_stats, opt_state, totals, ema), shown

    return train_step


def _test_step(
    apply: Callable[..., Any], prepare: Callable[[Array], jax.Array]
) -> Callable[[Variables, Totals, Batch], Totals]:
    def test_step(variables: Variables, totals: Totals, batch: Batch) -> Totals:
        logits, _ = apply(variables, prepare(batch.images))
        targets = jax.nn.one_hot(batch.labels, logits.shape[-1])
        return totals.add(_losses(logits, targets), logits, batch.labels, batch.mask)

    return test_step


def _predict_step(
    apply: Callable[..., Any], prepare: Callable[[Array], jax.Array]
) -> Callable[[Variables, Array], jax.Array]:
    def predict_step(variables: Variables, images: Array) -> jax.Array:
        logits, _ = apply(variables, prepare(images))
        return jax.nn.softmax(logits.astype(jnp.float32))

    return predict_step
