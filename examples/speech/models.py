"""The model of the flags as pure functions, in their precision, and its steps for tests and transcription."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax
from examples.common.training import Variables
from examples.speech.batching import Array, Batch
from examples.speech.config import OF_MODEL, Config
from examples.speech.decoding import Decoded, beam_search, greedy
from examples.speech.deepspeech import DeepSpeech, DeepSpeech2
from examples.speech.layers import time_mask


def create_model(config: Config, labels: int, rngs: nnx.Rngs) -> DeepSpeech | DeepSpeech2:
    """Creates the model given by the flags, with `labels` outputs per frame."""
    sizes = (config.front_end.size, labels, config.hidden)
    shared = ("stride", "cell", "bidirectional", "dropout")
    chosen = {name: getattr(config, name) for name in (*shared, *OF_MODEL[config.model])}
    return (DeepSpeech if config.model == "deepspeech" else DeepSpeech2)(*sizes, **chosen, rngs=rngs)


class Applied(NamedTuple):
    """The results of a model call."""

    logits: jax.Array  # [batch, frames, labels]
    lengths: Array  # [batch], in frames
    stats: Any


class Network(NamedTuple):
    """The model given by the flags as pure functions, in the precision of the flags."""

    init: Callable[[jax.Array], Variables]  # (key) -> variables
    # (params, stats, features, lengths, key=None) -> Applied. If a key is given, the call is in training mode: dropout
    # uses the key, and normalisation uses batch statistics.
    apply: Callable[..., Applied]


def create_network(config: Config, labels: int) -> Network:
    """Creates the model with its policy; `labels` is the number of outputs, the characters and the blank."""
    policy = mpjax.get_policy(config.policy)

    def create(key: jax.Array) -> nnx.Module:
        model = create_model(config, labels, nnx.Rngs(key))
        return mpjax.with_policy(model, policy) if config.amp == "module" else model

    graph = nnx.graphdef(nnx.eval_shape(lambda: create(jax.random.key(0))))

    def apply(params: Any, stats: Any, features: Array, lengths: Array, key: jax.Array | None = None) -> Applied:
        # A copy, because the state belongs to an outer trace and must not be changed here.
        model = nnx.merge(graph, params, stats, copy=True)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        logits, lengths = model(features, lengths, train=key is not None, rngs=rngs)
        return Applied(logits, lengths, nnx.state(model, nnx.BatchStat))

    return Network(
        lambda key: Variables(*nnx.split(create(key), nnx.Param, ...)[1:]),
        mpjax.autocast(apply, policy) if config.amp == "autocast" else apply,
    )


def create_test_step(config: Config, labels: int, beam: int = 0) -> Any:
    """Jitted (variables, batch) → (losses, whether logits are finite, Decoded); `beam` prefixes, or greedy if 0."""
    network = create_network(config, labels)

    def test_step(variables: Variables, batch: Batch) -> tuple[jax.Array, jax.Array, Decoded]:
        features, lengths, readable = finite_features(config, batch.audio, batch.audio_lengths)
        applied = network.apply(*variables, features, lengths)
        spoken = time_mask(applied.lengths, applied.logits.shape[1])[..., None] > 0
        finite = jnp.all(jnp.where(spoken, jnp.isfinite(applied.logits), True), axis=(1, 2))
        return jnp.where(readable, ctc_losses(applied, batch), jnp.nan), finite, _decode(applied, beam)

    return jax.jit(test_step)


def create_transcribe_step(config: Config, labels: int, beam: int = 0) -> Any:
    """Jitted (variables, batch) → Decoded, decoded as in `create_test_step`; uses only the audio of the batch."""
    network = create_network(config, labels)

    def transcribe_step(variables: Variables, batch: Batch) -> Decoded:
        return _decode(network.apply(*variables, *config.front_end(batch.audio, batch.audio_lengths)), beam)

    return jax.jit(transcribe_step)


def _decode(applied: Applied, beam: int) -> Decoded:
    return beam_search(*applied[:2], beam) if beam else greedy(*applied[:2])


def ctc_losses(applied: Applied, batch: Batch) -> jax.Array:
    """CTC loss of each utterance, in float32 even if the policy's output is half: it sums exps over all frames."""
    logits = applied.logits.astype(jnp.float32)
    frame_padding = 1.0 - time_mask(applied.lengths, logits.shape[1])
    label_padding = 1.0 - time_mask(batch.label_lengths, batch.labels.shape[1])
    return optax.ctc_loss(logits, frame_padding, batch.labels, label_padding)


def finite_features(config: Config, audio: Array, audio_lengths: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The features, their lengths, and whether each utterance's features are finite.

    An utterance with NaN or inf has no loss. Its features are replaced by zeros, so that they do not corrupt the
    batch's statistics.
    """
    features, lengths = config.front_end(audio, audio_lengths)
    finite = jnp.all(jnp.isfinite(features), axis=(1, 2))
    return jnp.where(finite[:, None, None], features, 0), lengths, finite
