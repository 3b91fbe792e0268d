"""The model, the optimizer and the jitted steps; what is about precision is in `mpjax.` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax
from examples.speech.augmentation import spec_augment
from examples.speech.batching import Array, Batch
from examples.speech.config import Config
from examples.speech.decoding import Decoded, beam_search, greedy
from examples.speech.layers import time_mask
from examples.speech.models import create_model


class Totals(NamedTuple):
    """Sums over utterances, kept on the device so that no step waits for the host."""

    loss: jax.Array  # shape=(), dtype=float32
    utterances: jax.Array  # shape=(), dtype=float32

    @classmethod
    def zero(cls) -> Totals:
        # Two arrays: one zero in both places would be one buffer, which can not be donated twice.
        return cls(jnp.zeros(()), jnp.zeros(()))

    def add(self, losses: Array, counted: Array) -> Totals:
        return Totals(self.loss + jnp.sum(jnp.where(counted, losses, 0)), self.utterances + jnp.sum(counted))

    def mean(self) -> float:
        """Mean loss, on the host; NaN where no utterance counted."""
        loss, utterances = (float(x) for x in jax.device_get(self))
        return loss / utterances if utterances else float("nan")


class TrainState(NamedTuple):
    """All that a step changes, and so all that a checkpoint holds."""

    step: jax.Array  # shape=(), dtype=int32
    params: Any
    stats: Any  # of batch normalisation
    opt_state: Any
    totals: Totals  # of the epoch so far
    not_finite: jax.Array  # shape=(utterances,), dtype=int32: how often the loss of each was inf or NaN


class Training(NamedTuple):
    """A training set-up: pure functions, and the state that they start from."""

    state: TrainState
    train_step: Any  # jitted (state, batch) -> (state, shown); donates the state
    test_step: Any  # jitted (state, batch, beam=0) -> (losses, Decoded)
    learning_rate: optax.Schedule


class Applied(NamedTuple):
    """What a call of the model gives."""

    logits: jax.Array  # [batch, frames, labels]
    lengths: jax.Array  # [batch], in frames
    stats: Any


Apply = Callable[..., Applied]


def create_training(config: Config, labels: int, utterances: int, steps: int, epoch_steps: int) -> Training:
    """Sets up training as the flags say.

    Args:
        config: the flags.
        labels: outputs of the model: characters and the blank.
        utterances: in the training set.
        steps: optimizer steps in the whole run, which the learning rate's schedule spans.
        epoch_steps: of one epoch.
    """
    policy = mpjax.get_policy(config.policy)
    apply, params, stats = create_apply(config, labels)
    warmup = min(round(config.warmup_epochs * epoch_steps), steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, steps)
    tx = mpjax.loss_scale_for(policy, _optimizer(config, schedule, policy))
    state = TrainState(
        jnp.zeros((), jnp.int32), params, stats, tx.init(params), Totals.zero(), jnp.zeros(utterances, jnp.int32)
    )
    return Training(
        state,
        jax.jit(_train_step(config, apply, tx), donate_argnums=0),
        jax.jit(_test_step(config, apply), static_argnames="beam"),
        schedule,
    )


def create_apply(config: Config, labels: int) -> tuple[Apply, Any, Any]:
    """The model as a function `apply(params, stats, features, lengths, key=None)`, in the precision of the flags.

    A key means training: dropout draws from it, and the statistics are those of the batch.

    Returns:
        The function, its parameters, and its batch statistics.
    """
    policy = mpjax.get_policy(config.policy)

    def create() -> nnx.Module:
        model = create_model(config, labels, nnx.Rngs(config.seed))
        return mpjax.with_policy(model, policy) if config.amp == "module" else model

    graph = nnx.graphdef(nnx.eval_shape(create))
    # Runs once, and optimising its random numbers would take longer than all the rest of the start.
    init = jax.jit(lambda: nnx.state(create(), nnx.Param, ...), compiler_options={"xla_backend_optimization_level": 0})
    params, stats = init()

    def apply(params: Any, stats: Any, features: Array, lengths: Array, key: jax.Array | None = None) -> Applied:
        # A copy: the state came in from outside this trace, where it may not be changed.
        model = nnx.merge(graph, params, stats, copy=True)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        logits, lengths = model(features, lengths, train=key is not None, rngs=rngs)
        return Applied(logits, lengths, nnx.state(model, nnx.BatchStat))

    return (mpjax.autocast(apply, policy) if config.amp == "autocast" else apply), params, stats


def _optimizer(config: Config, schedule: optax.Schedule, policy: mpjax.Policy) -> optax.GradientTransformation:
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(schedule, weight_decay=config.weight_decay, mask=_kernels),
    )
    if policy.param_dtype == policy.output_dtype:
        return _float32_moments(optimizer)
    # Half params under a float32 model (O2) need a float32 copy that small updates can add up in;
    # a policy that is half throughout (O3) asks to do without.
    return mpjax.master_weights(optimizer, policy)


def _float32_moments(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` with a state as of float32 params: Adam's squares of gradients would be zero in float16."""
    return optax.GradientTransformation(
        lambda params: tx.init(jax.tree.map(lambda x: x.astype(jnp.float32), params)), tx.update
    )


def _kernels(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def _losses(applied: Applied, batch: Batch) -> jax.Array:
    """CTC loss of each utterance; in float32 also where the policy's output is half: it adds exps over all frames."""
    logits = applied.logits.astype(jnp.float32)
    frame_padding = 1.0 - time_mask(applied.lengths, logits.shape[1])
    label_padding = 1.0 - time_mask(batch.label_lengths, batch.labels.shape[1])
    return optax.ctc_loss(logits, frame_padding, batch.labels, label_padding)


def _finite_features(config: Config, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Features and lengths, and of which utterances they are finite.

    A file with a NaN in it has no loss; zeros in its place keep it from taking the batch's statistics with it.
    """
    features, lengths = config.front_end(batch.audio, batch.audio_lengths)
    finite = jnp.all(jnp.isfinite(features), axis=(1, 2))
    return jnp.where(finite[:, None, None], features, 0), lengths, finite


def _train_step(
    config: Config, apply: Apply, tx: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        masks, dropout = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.step))
        features, lengths, readable = _finite_features(config, batch)
        if config.augment:
            features = spec_augment(masks, features, lengths)
        counted = readable & (batch.weights > 0)

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            applied = apply(params, state.stats, features, lengths, dropout)
            losses = _losses(applied, batch)
            mean = jnp.sum(jnp.where(counted, losses, 0)) / jnp.maximum(jnp.sum(counted), 1)
            return mean, (jnp.where(readable, losses, jnp.nan), applied.stats)

        value_and_grad = mpjax.value_and_grad(loss_fn, state.opt_state, has_aux=True)
        (loss, (losses, stats)), grads = value_and_grad(state.params)
        params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=loss)
        stats = mpjax.keep_if_finite(opt_state, stats, state.stats)
        finite = jnp.isfinite(losses)
        totals = state.totals.add(losses, counted & finite)
        # Filling has index -1, which would count for the last utterance.
        where = jnp.where((batch.weights > 0) & ~finite, batch.indices, len(state.not_finite))
        not_finite = state.not_finite.at[where].add(1, mode="drop")
        shown = {
            "totals": totals,
            "loss_scale": opt_state.loss_scale,
            "skipped_steps": opt_state.skipped_steps,
            "consecutive_skips": opt_state.consecutive_skips,
        }
        return TrainState(state.step + 1, params, stats, opt_state, totals, not_finite), shown

    return train_step


def _test_step(config: Config, apply: Apply) -> Callable[..., tuple[jax.Array, Decoded]]:
    def test_step(state: TrainState, batch: Batch, beam: int = 0) -> tuple[jax.Array, Decoded]:
        features, lengths, readable = _finite_features(config, batch)
        applied = apply(state.params, state.stats, features, lengths)
        losses = jnp.where(readable, _losses(applied, batch), jnp.nan)
        logits = applied.logits.astype(jnp.float32)
        decoded = beam_search(logits, applied.lengths, beam) if beam else greedy(logits, applied.lengths)
        return losses, decoded

    return test_step
