"""DeepSpeech (Hannun et al., 2014; three dense layers, a bidirectional recurrence, CTC) on spoken number words."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, draw
from benchmarks.parity.speech import FRAMES, SYMBOLS, character_error_rate, speakers

STEPS, WIDTH = 250, 64


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


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = models(batch["mel"], batch["frames"])
    padding = (jnp.arange(logits.shape[1]) >= batch["frames"][:, None]).astype(jnp.float32)
    each = optax.ctc_loss(logits, padding, batch["text"], (batch["text"] == 0).astype(jnp.float32))
    return jnp.mean(each), {}


FAMILY = Family(
    name="DeepSpeech",
    data="16 number words by espeak-ng, 12 voices to train and 4 held out",
    metric="character error rate, %",
    larger_is_better=False,
    modules={MODEL: DeepSpeech()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["mel"], batch["frames"])},
    batch=lambda rng: draw(rng, speakers()[0], 24),
    test=lambda: speakers()[1],
    predict=lambda models, test: models(test["mel"], test["frames"]),
    score=character_error_rate,
    optimizer=adam(3e-3, STEPS, clip=5.0),
    steps=STEPS,
)
