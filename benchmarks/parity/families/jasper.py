"""Jasper (Li et al., 2019; residual one-dimensional convolutions with batch norm, CTC) on spoken number words."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, draw
from benchmarks.parity.speech import SYMBOLS, character_error_rate, speakers

STEPS, WIDTH = 200, 48


class Block(nn.Module):
    """Two convolutions; the residual joins before the last activation."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        y = nn.relu(norm()(nn.Conv(WIDTH, (7,), use_bias=False)(x)))
        y = norm()(nn.Conv(WIDTH, (7,), use_bias=False)(y))
        return nn.relu(y + norm()(nn.Conv(WIDTH, (1,), use_bias=False)(x)))


class Jasper(nn.Module):
    @nn.compact
    def __call__(self, mel: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(WIDTH, (11,), use_bias=False)(mel)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for _ in range(2):
            x = Block()(x, train)
        return nn.Dense(SYMBOLS)(x)


def loss(models: Models, batch: Batch) -> tuple[jax.Array, object]:
    logits, updated = models.training(batch["mel"])
    padding = (jnp.arange(logits.shape[1]) >= batch["frames"][:, None]).astype(jnp.float32)
    each = optax.ctc_loss(logits, padding, batch["text"], (batch["text"] == 0).astype(jnp.float32))
    return jnp.mean(each), updated


FAMILY = Family(
    name="Jasper",
    data="16 number words by espeak-ng, 12 voices to train and 4 held out",
    metric="character error rate, %",
    larger_is_better=False,
    modules={MODEL: Jasper()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["mel"], True)},
    batch=lambda rng: draw(rng, speakers()[0], 24),
    test=lambda: speakers()[1],
    predict=lambda models, test: models(test["mel"], train=False),
    score=character_error_rate,
    optimizer=adam(3e-3, STEPS, clip=5.0),
    steps=STEPS,
)
