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
    seed: jax.Array  # shape=(), dtype=uint32: here and not in the program, which so is the same for every seed
    params: Any
    stats: Any  # of batch normalisation
    opt_state: Any
    totals: Totals  # of the epoch so far
    not_finite: jax.Array  # shape=(utterances,), dtype=int32: how often the loss of each was inf or NaN


class Variables(NamedTuple):
    """What a trained model is."""

    params: Any
    stats: Any


class Applied(NamedTuple):
    """What a call of the model gives."""

    logits: jax.Array  # [batch, frames, labels]
    lengths: Array  # [batch], in frames
    stats: Any


class Network(NamedTuple):
    """The model of the flags as pure functions, in their precision."""

    init: Callable[[Array], Variables]  # of a seed
    # (params, stats, features, lengths, key=None); a key means training: dropout draws from it, and the statistics
    # are those of the batch.
    apply: Callable[..., Applied]


class Training(NamedTuple):
    """A training set-up: pure functions."""

    init: Callable[[Array], TrainState]  # of a seed
    train_step: Any  # jitted (state, batch) -> (state, shown); donates the state
    learning_rate: optax.Schedule


def create_network(config: Config, labels: int) -> Network:
    """The model with its policy; `labels` are its outputs, characters and the blank."""
    policy = mpjax.get_policy(config.policy)

    def create(seed: Array) -> nnx.Module:
        model = create_model(config, labels, nnx.Rngs(jax.random.key(seed)))
        return mpjax.with_policy(model, policy) if config.amp == "module" else model

    graph = nnx.graphdef(nnx.eval_shape(lambda: create(jnp.zeros((), jnp.uint32))))

    def apply(params: Any, stats: Any, features: Array, lengths: Array, key: jax.Array | None = None) -> Applied:
        # A copy: the state came in from outside this trace, where it may not be changed.
        model = nnx.merge(graph, params, stats, copy=True)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        logits, lengths = model(features, lengths, train=key is not None, rngs=rngs)
        return Applied(logits, lengths, nnx.state(model, nnx.BatchStat))

    return Network(
        lambda seed: Variables(*nnx.split(create(seed), nnx.Param, ...)[1:]),
        mpjax.autocast(apply, policy) if config.amp == "autocast" else apply,
    )


def create_training(config: Config, labels: int, utterances: int, steps: int, epoch_steps: int) -> Training:
    """Sets up training as the flags say.

    Args:
        config: the flags.
        labels: outputs of the model: characters and the blank.
        utterances: in the training set.
        steps: optimizer steps in the whole run, which the learning rate's schedule spans.
        epoch_steps: of one epoch.
    """
    policy, network = mpjax.get_policy(config.policy), create_network(config, labels)
    warmup = min(round(config.warmup_epochs * epoch_steps), steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.learning_rate, warmup, steps)
    tx = mpjax.loss_scale_for(policy, _optimizer(config, schedule, policy))

    def init(seed: Array) -> TrainState:
        params, stats = network.init(seed)
        step, not_finite = jnp.zeros((), jnp.int32), jnp.zeros(utterances, jnp.int32)
        return TrainState(step, jnp.uint32(seed), params, stats, tx.init(params), Totals.zero(), not_finite)

    return Training(
        init,
        jax.jit(_train_step(config, network, tx), donate_argnums=0),
        schedule,
    )


def create_test_step(config: Config, labels: int, beam: int = 0) -> Any:
    """Jitted (variables, batch) → (losses, Decoded): by the greedy decoder, or with a beam of so many prefixes."""
    network = create_network(config, labels)

    def test_step(variables: Variables, batch: Batch) -> tuple[jax.Array, Decoded]:
        features, lengths, readable = _finite_features(config, batch.audio, batch.audio_lengths)
        applied = network.apply(*variables, features, lengths)
        return jnp.where(readable, ctc_losses(applied, batch), jnp.nan), _decode(applied, beam)

    return jax.jit(test_step)


def create_transcribe_step(config: Config, labels: int, beam: int = 0) -> Any:
    """Jitted (variables, audio, lengths) → Decoded, as of `create_test_step`."""
    network = create_network(config, labels)

    def transcribe_step(variables: Variables, audio: Array, lengths: Array) -> Decoded:
        return _decode(network.apply(*variables, *config.front_end(audio, lengths)), beam)

    return jax.jit(transcribe_step)


def _decode(applied: Applied, beam: int) -> Decoded:
    return beam_search(*applied[:2], beam) if beam else greedy(*applied[:2])


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


def ctc_losses(applied: Applied, batch: Batch) -> jax.Array:
    """CTC loss of each utterance; in float32 also where the policy's output is half: it adds exps over all frames."""
    logits = applied.logits.astype(jnp.float32)
    frame_padding = 1.0 - time_mask(applied.lengths, logits.shape[1])
    label_padding = 1.0 - time_mask(batch.label_lengths, batch.labels.shape[1])
    return optax.ctc_loss(logits, frame_padding, batch.labels, label_padding)


def _finite_features(config: Config, audio: Array, audio_lengths: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Features and lengths, and of which utterances they are finite.

    A file with a NaN in it has no loss; zeros in its place keep it from taking the batch's statistics with it.
    """
    features, lengths = config.front_end(audio, audio_lengths)
    finite = jnp.all(jnp.isfinite(features), axis=(1, 2))
    return jnp.where(finite[:, None, None], features, 0), lengths, finite


def _train_step(
    config: Config, network: Network, tx: optax.GradientTransformation
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]:
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        masks, dropout = jax.random.split(jax.random.fold_in(jax.random.key(state.seed), state.step))
        features, lengths, readable = _finite_features(config, batch.audio, batch.audio_lengths)
        if config.augment:
            features = spec_augment(masks, features, lengths)
        counted = readable & (batch.weights > 0)

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            applied = network.apply(params, state.stats, features, lengths, dropout)
            losses = ctc_losses(applied, batch)
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
        return TrainState(state.step + 1, state.seed, params, stats, opt_state, totals, not_finite), shown

    return train_step
