"""Tacotron 2 (Shen et al., 2018; LSTM, location-free attention, teacher forcing): spelling to spectrogram."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, as_float, draw
from benchmarks.parity.speech import FRAMES, MELS, SYMBOLS, vocabulary

STEPS, WIDTH = 250, 64


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


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    return errors(models, batch), {}


FAMILY = Family(
    name="Tacotron 2",
    data="240 words by espeak-ng, 60 others held out",
    metric="spectrogram error",
    larger_is_better=False,
    modules={MODEL: Tacotron()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["text"], batch["mel"])},
    batch=lambda rng: draw(rng, vocabulary()[0], 24),
    test=lambda: vocabulary()[1],
    predict=errors,
    score=as_float,
    optimizer=adam(5e-3, STEPS, clip=1.0),
    steps=STEPS,
)
