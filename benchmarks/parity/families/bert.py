"""BERT (Devlin et al., 2018): masked characters of Python source, then which package a piece is from."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, accuracy, adam, cross_entropy
from benchmarks.parity.sources import standard_library

PACKAGES = ("asyncio", "email", "unittest", "xml/dom")
STEPS, LENGTH, WIDTH, MASK = 240, 64, 64, 0
PRETRAINING = 0.5  # of the batches


class Encoder(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(128, WIDTH)(text) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        x = nn.LayerNorm()(x)
        for _ in range(self.layers):
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x))
            x = nn.LayerNorm()(x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x))))
        return nn.Dense(128)(x), nn.Dense(len(PACKAGES))(jnp.tanh(nn.Dense(WIDTH)(jnp.mean(x, 1))))


@functools.cache
def texts(train: bool) -> tuple[np.ndarray, ...]:
    """Source of each package as ASCII; every fourth file is held out."""
    found = []
    for package in PACKAGES:
        files = list(standard_library((package,)).values())
        text = "".join(text for i, text in enumerate(files) if (i % 4 != 3) == train)
        found.append(np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32))
    return tuple(found)


def pieces(rng: np.random.Generator, count: int, train: bool) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.integers(len(PACKAGES), size=count).astype(np.int32)
    sources = [texts(train)[label] for label in labels]
    starts = [rng.integers(len(source) - LENGTH) for source in sources]
    return np.stack([s[i : i + LENGTH] for s, i in zip(sources, starts, strict=True)]), labels


def batch(rng: np.random.Generator) -> Batch:
    """A fine-tuning batch masks nothing; the mix of both kinds makes one compiled step."""
    text, labels = pieces(rng, 32, train=True)
    pretraining = rng.random() < PRETRAINING
    masked = rng.random(text.shape) < 0.15 * pretraining
    return {
        "text": np.where(masked, MASK, text),
        "target": text,
        "masked": masked,
        "label": labels,
        "pretraining": np.float32(pretraining),
    }


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    characters, package = models(batch["text"])
    each = optax.softmax_cross_entropy_with_integer_labels(characters, batch["target"])
    masked = jnp.sum(jnp.where(batch["masked"], each, 0.0)) / jnp.maximum(jnp.sum(batch["masked"]), 1)
    tuning = cross_entropy(package, batch["label"])
    return batch["pretraining"] * masked + (1 - batch["pretraining"]) * tuning, {}


@functools.cache
def held_out() -> Batch:
    text, label = pieces(np.random.default_rng(0), 1024, train=False)
    return {"text": text, "label": label}


FAMILY = Family(
    name="BERT",
    data="Python's standard library, 4 packages, every fourth file held out",
    metric="accuracy, %",
    modules={MODEL: Encoder()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["text"],)},
    batch=batch,
    test=held_out,
    predict=lambda models, test: jnp.argmax(models(test["text"])[1], -1),
    score=accuracy,
    optimizer=adam(2e-3, STEPS, clip=1.0),
    steps=STEPS,
)
