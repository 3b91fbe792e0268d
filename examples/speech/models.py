"""The model of the flags as pure functions, in their precision, its CTC loss, and its steps for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import ArrayLike

import mpjax
from examples.common.training import Variables
from examples.speech.batching import Array, Batch
from examples.speech.config import Config
from examples.speech.deepspeech import DeepSpeech, time_mask
from examples.speech.features import features_of


class Network(NamedTuple):
    """The model given by the flags as pure functions, in the precision of the flags."""

    init: Callable[[jax.Array], Variables]  # (key) -> variables, without statistics
    # (params, features, lengths, key=None) -> logits [batch, frames, labels], lengths [batch]. Dropout uses the key.
    apply: Callable[..., tuple[jax.Array, jax.Array]]


def create_network(config: Config, labels: int) -> Network:
    """Creates the model with its policy; `labels` is the number of outputs, the characters and the blank."""
    policy = mpjax.get_policy(config.policy)

    def create(key: jax.Array) -> nnx.Module:
        model = DeepSpeech(config, labels, rngs=nnx.Rngs(key))
        return mpjax.with_policy(model, policy) if config.amp == "module" else model

    graph = nnx.graphdef(nnx.eval_shape(lambda: create(jax.random.key(0))))

    def apply(params: Any, features: Array, lengths: Array, key: jax.Array | None = None) -> Any:
        # A copy, because the state belongs to an outer trace and must not be changed here.
        model = nnx.merge(graph, params, copy=True)
        rngs = None if key is None else nnx.Rngs(dropout=key)
        return model(features, lengths, train=key is not None, rngs=rngs)

    def init(key: jax.Array) -> Variables:
        return Variables(nnx.state(create(key), nnx.Param), {})

    return Network(init, mpjax.autocast(apply, policy) if config.amp == "autocast" else apply)


def create_test_step(config: Config, labels: int) -> Any:
    """Jitted (variables, batch) → (losses, Decoded)."""
    network = create_network(config, labels)

    def test_step(variables: Variables, batch: Batch) -> tuple[jax.Array, Decoded]:
        features, lengths, readable = finite_features(batch.audio, batch.audio_lengths)
        outputs = network.apply(variables.params, features, lengths)
        return jnp.where(readable, ctc_losses(*outputs, batch), jnp.nan), greedy(*outputs)

    return jax.jit(test_step)


def create_transcribe_step(config: Config, labels: int) -> Any:
    """Jitted (variables, batch) → Decoded; uses only the audio of the batch."""
    network = create_network(config, labels)

    def transcribe_step(variables: Variables, batch: Batch) -> Decoded:
        return greedy(*network.apply(variables.params, *features_of(batch.audio, batch.audio_lengths)))

    return jax.jit(transcribe_step)


def ctc_losses(logits: jax.Array, lengths: Array, batch: Batch) -> jax.Array:
    """CTC loss of each utterance, in float32 even if the policy's output is half: it sums exps over all frames."""
    logits = logits.astype(jnp.float32)
    frame_padding = 1.0 - time_mask(lengths, logits.shape[1])
    label_padding = 1.0 - time_mask(batch.label_lengths, batch.labels.shape[1])
    return optax.ctc_loss(logits, frame_padding, batch.labels, label_padding)


def finite_features(audio: Array, audio_lengths: Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The features, their lengths, and whether each utterance's features are finite.

    An utterance with NaN or inf has no loss. Its features are replaced by zeros, so that they do not corrupt the
    gradients of the batch.
    """
    features, lengths = features_of(audio, audio_lengths)
    finite = jnp.all(jnp.isfinite(features), axis=(1, 2))
    return jnp.where(finite[:, None, None], features, 0), lengths, finite


class Decoded(NamedTuple):
    """Decoded labels; `Alphabet.decode(labels[i, :lengths[i]])` is the text of utterance i."""

    labels: jax.Array  # [batch, frames], int32, 0 past the length
    lengths: jax.Array  # [batch], int32; 0 without finite logits
    finite: jax.Array  # [batch], bool: whether the logits are


def greedy(logits: ArrayLike, lengths: ArrayLike) -> Decoded:
    """The text of the most probable alignment: the best label of each frame, without repeats and blanks.

    Args:
        logits: [batch, frames, labels], of any float dtype; label 0 is CTC's blank.
        lengths: [batch], in frames; later frames are ignored.
    """
    best = jnp.argmax(jnp.asarray(logits), axis=-1).astype(jnp.int32)
    inside = time_mask(lengths, best.shape[1])
    # Without finite logits there is no transcript: every word counts as wrong.
    finite = jnp.all(jnp.isfinite(logits) | ~inside[..., None], axis=(1, 2))
    before = jnp.pad(best, ((0, 0), (1, 0)))[:, :-1]
    written = inside & (best != 0) & (best != before) & finite[:, None]
    # A stable sort by "not written" moves the written labels to the front, in order.
    order = jnp.argsort(~written, axis=1, stable=True)
    labels = jnp.take_along_axis(jnp.where(written, best, 0), order, axis=1)
    return Decoded(labels, jnp.sum(written, axis=1, dtype=jnp.int32), finite)
