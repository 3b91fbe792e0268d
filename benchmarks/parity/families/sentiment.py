"""Sentiment from embeddings (mean of n-gram embeddings and an MLP; fastText, Joulin et al., 2016) of rated words."""

from __future__ import annotations

import functools
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Models, accuracy, adam, cross_entropy, draw
from benchmarks.parity.sources import package_file

STEPS, BUCKETS, GRAMS = 300, 4096, 32


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, grams: jax.Array) -> jax.Array:
        present = (grams > 0)[..., None]
        x = jnp.sum(jnp.where(present, nn.Embed(BUCKETS, 32)(grams), 0.0), 1) / jnp.sum(present, 1)
        return nn.Dense(2)(nn.relu(nn.Dense(32)(x)))


def grams(word: str) -> list[int]:
    """Buckets of the word's pieces of 3 to 5 characters; 0 pads."""
    marked = f"<{word}>"
    pieces = [marked[i : i + n] for n in (3, 4, 5) for i in range(len(marked) - n + 1)]
    found = [1 + zlib.crc32(piece.encode()) % (BUCKETS - 1) for piece in pieces[:GRAMS]]
    return found + [0] * (GRAMS - len(found))


@functools.cache
def words() -> tuple[Batch, Batch]:
    """Words of the VADER lexicon with the sign of their mean rating; three of ten are held out."""
    lines = package_file("vaderSentiment", "vader_lexicon.txt").read_text(encoding="utf-8").splitlines()
    rated = [line.split("\t")[:2] for line in lines]
    kept = [(word, float(rating)) for word, rating in rated if word.isalpha() and word.isascii()]
    order = np.random.default_rng(0).permutation(len(kept))
    everything = {
        "grams": np.array([grams(word) for word, _ in kept], np.int32)[order],
        "label": np.array([rating > 0 for _, rating in kept], np.int32)[order],
    }
    split = len(kept) * 7 // 10
    return (
        {name: column[:split] for name, column in everything.items()},
        {name: column[split:] for name, column in everything.items()},
    )


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    return cross_entropy(models(batch["grams"]), batch["label"]), {}


FAMILY = Family(
    name="Sentiment",
    data="words rated by people (VADER lexicon)",
    metric="accuracy, %",
    modules={MODEL: Classifier()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["grams"],)},
    batch=lambda rng: draw(rng, words()[0], 128),
    test=lambda: words()[1],
    predict=lambda models, test: jnp.argmax(models(test["grams"]), -1),
    score=accuracy,
    optimizer=adam(1e-2, STEPS),
    steps=STEPS,
)
