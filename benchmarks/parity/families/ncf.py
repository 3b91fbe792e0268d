"""Neural collaborative filtering (NeuMF, He et al., 2017): which identifiers a Python file uses."""

from __future__ import annotations

import collections
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam
from benchmarks.parity.sources import standard_library

STEPS, ITEMS, NEGATIVES, CANDIDATES, HIDDEN = 600, 400, 4, 100, 3
PACKAGES = (".", "asyncio", "concurrent/futures", "ctypes", "email", "http", "importlib", "unittest", "xml/dom")


class NeuMF(nn.Module):
    """A product of embeddings and an MLP of others, joined by the last layer."""

    users: int

    @nn.compact
    def __call__(self, user: jax.Array, item: jax.Array) -> jax.Array:
        product = nn.Embed(self.users, 16)(user) * nn.Embed(ITEMS, 16)(item)
        x = jnp.concatenate([nn.Embed(self.users, 16)(user), nn.Embed(ITEMS, 16)(item)], -1)
        for width in (32, 16):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(jnp.concatenate([product, x], -1))[..., 0]


@functools.cache
def usage() -> np.ndarray:
    """Whether a file [users] uses an identifier [items]: files are the users, and identifiers the items."""
    words = [set(re.findall(r"[A-Za-z_]{4,}", text)) for text in standard_library(PACKAGES).values()]
    counts = collections.Counter(word for found in words for word in found)
    # Words that nearly every file uses are not informative.
    items = sorted(sorted(counts), key=lambda word: -counts[word])[ITEMS : 2 * ITEMS]
    table = np.array([[item in found for item in items] for found in words])
    used = table.sum(1)
    return table[(used >= 10) & (used <= ITEMS - CANDIDATES)]


@functools.cache
def held_out() -> Batch:
    """For each file three identifiers that it uses, hidden from training, each with 99 that it does not use."""
    rng = np.random.default_rng(0)
    items = []
    for row in usage():
        for positive in rng.choice(np.flatnonzero(row), HIDDEN, replace=False):
            items.append([positive, *rng.choice(np.flatnonzero(~row), CANDIDATES - 1, replace=False)])
    item = np.array(items, np.int32)
    users = np.repeat(np.arange(len(usage()), dtype=np.int32), HIDDEN)
    return {"item": item, "user": np.repeat(users[:, None], CANDIDATES, 1)}


@functools.cache
def training_pairs() -> np.ndarray:
    table = usage().copy()
    table[held_out()["user"][:, 0], held_out()["item"][:, 0]] = False
    return np.argwhere(table).astype(np.int32)


def batch(rng: np.random.Generator) -> Batch:
    positive = training_pairs()[rng.integers(len(training_pairs()), size=128)]
    user = np.repeat(positive[:, 0], 1 + NEGATIVES)
    item = rng.integers(ITEMS, size=(128, 1 + NEGATIVES)).astype(np.int32)
    item[:, 0] = positive[:, 1]
    label = np.zeros(item.shape, np.float32)
    label[:, 0] = 1.0
    return {"user": user, "item": item.ravel(), "label": label.ravel()}


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = models(batch["user"], batch["item"])
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["label"])), {}


def hits(scores: np.ndarray, test: Batch) -> float:
    """Percentage of hidden identifiers that are among the ten best of their hundred."""
    scores = np.asarray(scores, np.float32)
    return 100 * float(np.mean((scores[:, 1:] > scores[:, :1]).sum(1) < 10))


FAMILY = Family(
    name="NCF",
    data="identifiers of Python's standard library by file",
    metric="hit rate at 10, %",
    modules={MODEL: NeuMF(len(usage()))},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["user"], batch["item"])},
    batch=batch,
    test=held_out,
    predict=lambda models, test: models(test["user"], test["item"]),
    score=hits,
    optimizer=adam(3e-2, STEPS),
    steps=STEPS,
)
