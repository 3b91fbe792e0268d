"""Speech recognition and synthesis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Loss, Models, adam, as_float, draw, stateless
from benchmarks.parity.speech import FRAMES, MELS, SYMBOLS, character_error_rate, speakers, vocabulary, waves

WIDTH = 64
Inputs = Callable[[Batch], tuple[Any, ...]]
Predict = Callable[[Models, Batch], jax.Array]


def clipped(x: jax.Array) -> jax.Array:
    """The paper's ReLU with a ceiling of 20."""
    return jnp.clip(x, 0, 20)


class DeepSpeech(nn.Module):
    @nn.compact
    def __call__(self, mel: jax.Array, frames: jax.Array) -> jax.Array:
        # Each frame is seen with its neighbours.
        x = jnp.concatenate([jnp.roll(mel, shift, 1) for shift in (-2, -1, 0, 1, 2)], -1)
        x = x.reshape(len(x), FRAMES, -1)
        for _ in range(2):
            x = clipped(nn.Dense(WIDTH)(x))
        forward, backward = (nn.RNN(nn.SimpleCell(WIDTH, activation_fn=clipped)) for _ in range(2))
        both: Any = nn.Bidirectional(forward, backward, merge_fn=lambda a, b: a + b)
        x = both(x, seq_lengths=frames)
        return nn.Dense(SYMBOLS)(clipped(nn.Dense(WIDTH)(x)))


def ctc_loss(logits: jax.Array, batch: Batch) -> jax.Array:
    padding = (jnp.arange(logits.shape[1]) >= batch["frames"][:, None]).astype(jnp.float32)
    return jnp.mean(optax.ctc_loss(logits, padding, batch["text"], (batch["text"] == 0).astype(jnp.float32)))


def recogniser(name: str, model: nn.Module, loss: Loss, inputs: Inputs, predict: Predict, steps: int) -> Family:
    """The family of a model that spells number words."""
    return Family(
        name=name,
        data="16 number words by espeak-ng, 12 voices to train and 4 held out",
        metric="character error rate, %",
        larger_is_better=False,
        modules={MODEL: model},
        losses={MODEL: loss},
        example=lambda batch: {MODEL: inputs(batch)},
        batch=lambda rng: draw(rng, speakers()[0], 24),
        test=lambda: speakers()[1],
        predict=predict,
        score=character_error_rate,
        optimizer=adam(3e-3, clip=5.0),
        steps=steps,
    )


def deepspeech() -> Family:
    """DeepSpeech (Hannun et al., 2014; three dense layers, a bidirectional recurrence, CTC) on spoken number words."""

    def predict(models: Models, batch: Batch) -> jax.Array:
        return models(batch["mel"], batch["frames"])

    loss = stateless(lambda models, batch: ctc_loss(predict(models, batch), batch))
    return recogniser("DeepSpeech", DeepSpeech(), loss, lambda batch: (batch["mel"], batch["frames"]), predict, 250)


class Block(nn.Module):
    """Two convolutions; the residual joins before the last activation."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(48, (7,), use_bias=False)(x)))
        y = norm()(nn.Conv(48, (7,), use_bias=False)(y))
        return nn.relu(y + norm()(nn.Conv(48, (1,), use_bias=False)(x)))


class Jasper(nn.Module):
    @nn.compact
    def __call__(self, mel: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(48, (11,), use_bias=False)(mel)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for _ in range(2):
            x = Block()(x, train)
        return nn.Dense(SYMBOLS)(x)


def jasper() -> Family:
    """Jasper (Li et al., 2019; residual one-dimensional convolutions with batch norm, CTC) on spoken number words."""

    def loss(models: Models, batch: Batch) -> tuple[jax.Array, Any]:
        logits, updated = models.training(batch["mel"])
        return ctc_loss(logits, batch), updated

    def predict(models: Models, batch: Batch) -> jax.Array:
        return models(batch["mel"], train=False)

    return recogniser("Jasper", Jasper(), loss, lambda batch: (batch["mel"], True), predict, 200)


class Tacotron(nn.Module):
    @nn.compact
    def __call__(self, text: jax.Array, mel: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(SYMBOLS, WIDTH)(text)
        x = nn.relu(nn.Conv(WIDTH, (3,))(x))
        memory = nn.RNN(nn.OptimizedLSTMCell(WIDTH))(x)
        previous = jnp.pad(mel, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        place = self.param("positions", nn.initializers.normal(0.1), (FRAMES, WIDTH))
        # A narrow layer in front of the decoder keeps it from only copying the last frame.
        frames = nn.relu(nn.Dense(16)(previous))
        decoder: Any = nn.RNN(nn.OptimizedLSTMCell(WIDTH))
        query = decoder(nn.Dense(WIDTH)(frames) + place)
        mask = nn.make_attention_mask(jnp.ones(mel.shape[:2]), text > 0)
        context = nn.MultiHeadDotProductAttention(1)(query, memory, mask=mask)
        before = nn.Dense(MELS)(jnp.concatenate([query, context], -1))
        return before, before + nn.Conv(MELS, (5,))(nn.tanh(nn.Conv(WIDTH, (5,))(before)))


def errors(models: Models, batch: Batch) -> jax.Array:
    """Mean square error of both outputs on the frames that there are."""
    real = (jnp.arange(FRAMES) < batch["frames"][:, None])[..., None]
    each = sum(jnp.where(real, (y - batch["mel"]) ** 2, 0.0) for y in models(batch["text"], batch["mel"]))
    return jnp.sum(each) / (2 * MELS * jnp.sum(batch["frames"]))


def tacotron() -> Family:
    """Tacotron 2 (Shen et al., 2018; LSTM, location-free attention, teacher forcing): spelling to spectrogram."""
    return Family(
        name="Tacotron 2",
        data="240 words by espeak-ng, 60 others held out",
        metric="spectrogram error",
        larger_is_better=False,
        modules={MODEL: Tacotron()},
        losses={MODEL: stateless(errors)},
        example=lambda batch: {MODEL: (batch["text"], batch["mel"])},
        batch=lambda rng: draw(rng, vocabulary()[0], 24),
        test=lambda: vocabulary()[1],
        predict=errors,
        score=as_float,
        optimizer=adam(5e-3, clip=1.0),
        steps=250,
    )


GROUP, WAVE, WAVEGLOW_WIDTH, FLOWS = 8, 512, 32, 3


class Coupling(nn.Module):
    """Scale and shift of one half of the channels, by the other half and the condition."""

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = jnp.split(x, 2, -1)
        gated = nn.Conv(2 * WAVEGLOW_WIDTH, (3,))(a) + nn.Dense(2 * WAVEGLOW_WIDTH)(condition)
        hidden = jnp.tanh(gated[..., :WAVEGLOW_WIDTH]) * nn.sigmoid(gated[..., WAVEGLOW_WIDTH:])
        log_scale, shift = jnp.split(nn.Conv(GROUP, (3,), kernel_init=nn.initializers.zeros)(hidden), 2, -1)
        return jnp.concatenate([a, b * jnp.exp(log_scale) + shift], -1), jnp.sum(log_scale, (1, 2))


class WaveGlow(nn.Module):
    @nn.compact
    def __call__(self, wave: jax.Array, condition: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = wave.reshape(len(wave), -1, GROUP)
        total = jnp.zeros(len(wave))
        for i in range(FLOWS):
            mixing = self.param(f"mixing_{i}", nn.initializers.orthogonal(), (GROUP, GROUP))
            x, log_scale = Coupling()(x @ mixing, condition)
            total += log_scale + x.shape[1] * jnp.linalg.slogdet(mixing)[1]
        return x, total


def dithered(rng: np.random.Generator, wave: np.ndarray, count: int) -> Batch:
    """Pieces of a wave, dithered by what 16 bits can not hold, with their energy every 64 samples as condition."""
    starts = rng.integers(len(wave) - WAVE, size=(count, 1))
    found = wave[starts + np.arange(WAVE)] + rng.normal(0, 0.01, (count, WAVE))
    energy = np.log(1e-3 + np.mean(found.reshape(count, -1, 64) ** 2, -1, keepdims=True))
    return {"wave": found.astype(np.float32), "condition": np.repeat(energy, 64 // GROUP, 1).astype(np.float32)}


def bits_per_sample(models: Models, batch: Batch) -> jax.Array:
    """Negative log-likelihood under a standard normal prior."""
    z, log_determinant = models(batch["wave"], batch["condition"])
    nats = jnp.sum(0.5 * (z**2 + jnp.log(2 * jnp.pi)), (1, 2)) - log_determinant
    return jnp.mean(nats) / (WAVE * jnp.log(2.0))


def waveglow() -> Family:
    """WaveGlow (Prenger et al., 2018; invertible 1×1 convolutions, affine coupling) of speech."""
    return Family(
        name="WaveGlow",
        data="number words by espeak-ng at 8 kHz, every fifth held out",
        metric="bits per sample",
        larger_is_better=False,
        modules={MODEL: WaveGlow()},
        losses={MODEL: stateless(bits_per_sample)},
        example=lambda batch: {MODEL: (batch["wave"], batch["condition"])},
        batch=lambda rng: dithered(rng, waves()[0], 24),
        test=lambda: dithered(np.random.default_rng(0), waves()[1], 128),
        predict=bits_per_sample,
        score=as_float,
        optimizer=adam(3e-3, clip=1.0),
        steps=250,
    )
