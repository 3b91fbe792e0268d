"""Embeddings of categories, and graphs."""

from __future__ import annotations

import collections
import csv
import functools
import re
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, accuracy, adam, cross_entropy, draw, split, stateless
from benchmarks.parity.sources import digits, package_file, standard_library
from testing.models.published.ncf import NeuMF

ITEMS, NEGATIVES, CANDIDATES, HIDDEN = 400, 4, 100, 3
PACKAGES = (".", "asyncio", "concurrent/futures", "ctypes", "email", "http", "importlib", "unittest", "xml/dom")


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
def hidden_items() -> Batch:
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
    table[hidden_items()["user"][:, 0], hidden_items()["item"][:, 0]] = False
    return np.argwhere(table).astype(np.int32)


def ncf_batch(rng: np.random.Generator) -> Batch:
    positive = training_pairs()[rng.integers(len(training_pairs()), size=128)]
    user = np.repeat(positive[:, 0], 1 + NEGATIVES)
    item = rng.integers(ITEMS, size=(128, 1 + NEGATIVES)).astype(np.int32)
    item[:, 0] = positive[:, 1]
    label = np.zeros(item.shape, np.float32)
    label[:, 0] = 1.0
    return {"user": user, "item": item.ravel(), "label": label.ravel()}


def ncf_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = models(batch["user"], batch["item"])
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["label"])), {}


def hits(scores: np.ndarray, test: Batch) -> float:
    """Percentage of hidden identifiers that are among the ten best of their hundred."""
    scores = np.asarray(scores, np.float32)
    return 100 * float(np.mean((scores[:, 1:] > scores[:, :1]).sum(1) < 10))


def ncf() -> Family:
    """Neural collaborative filtering (NeuMF, He et al., 2017): which identifiers a Python file uses."""
    return Family(
        name="NCF",
        data="identifiers of Python's standard library by file",
        metric="hit rate at 10, %",
        modules={MODEL: NeuMF(len(usage()), ITEMS, factors=16, widths=(32, 32, 16))},
        losses={MODEL: ncf_loss},
        example=lambda batch: {MODEL: (batch["user"], batch["item"])},
        batch=ncf_batch,
        test=hidden_items,
        predict=lambda models, test: models(test["user"], test["item"]),
        score=hits,
        optimizer=adam(3e-2),
        steps=600,
    )


INDUSTRIES, YEARS = 22, 10


class Tabular(nn.Module):
    @nn.compact
    def __call__(self, industry: jax.Array, year: jax.Array, month: jax.Array, time: jax.Array) -> jax.Array:
        embedded = [nn.Embed(INDUSTRIES, 8)(industry), nn.Embed(YEARS, 4)(year), nn.Embed(12, 4)(month)]
        x = jnp.concatenate([*embedded, time[:, None]], -1)
        for width in (64, 32):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


@functools.cache
def employment() -> tuple[Batch, Batch]:
    """Rows of industry, year, month and log employment; three of ten are held out. The column of changes is left."""
    with package_file("vega_datasets", "_data", "us-employment.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = list(rows[0])[1:-1]
    values = np.log([[float(row[name]) for name in columns] for row in rows])
    month, industry = np.meshgrid(np.arange(len(rows)), np.arange(len(columns)), indexing="ij")
    table = {
        "industry": industry.ravel().astype(np.int32),
        "year": (month.ravel() // 12).astype(np.int32),
        "month": (month.ravel() % 12).astype(np.int32),
        "time": (month.ravel() / len(rows) - 0.5).astype(np.float32),
        "target": ((values - values.mean()) / values.std()).ravel().astype(np.float32),
        "unit": np.full(values.size, values.std(), np.float32),
    }
    return split(table)


def log_employment(models: Models, batch: Batch) -> jax.Array:
    return models(batch["industry"], batch["year"], batch["month"], batch["time"])


def rossmann_loss(models: Models, batch: Batch) -> jax.Array:
    return jnp.mean((log_employment(models, batch) - batch["target"]) ** 2)


def percentage_error(predicted: np.ndarray, test: Batch) -> float:
    """Root mean square percentage error, the metric of the Rossmann competition."""
    log_ratio = (np.asarray(predicted, np.float32) - test["target"]) * test["unit"]
    return 100 * float(np.sqrt(np.mean(np.expm1(log_ratio) ** 2)))


def rossmann() -> Family:
    """Tabular MLP with entity embeddings (Guo & Berkhahn, 2016): employment by industry and month."""
    return Family(
        name="Rossmann MLP",
        data="US employment by industry (vega_datasets), 30 % of the months held out",
        metric="RMSPE, %",
        larger_is_better=False,
        modules={MODEL: Tabular()},
        losses={MODEL: stateless(rossmann_loss)},
        example=lambda batch: {MODEL: tuple(batch[name] for name in ("industry", "year", "month", "time"))},
        batch=lambda rng: draw(rng, employment()[0], 128),
        test=lambda: employment()[1],
        predict=log_employment,
        score=percentage_error,
        optimizer=adam(1e-2),
        steps=400,
    )


BUCKETS, GRAMS = 4096, 32


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
    codes, labels = [grams(word) for word, _ in kept], [rating > 0 for _, rating in kept]
    return split({"grams": np.array(codes, np.int32), "label": np.array(labels, np.int32)})


def sentiment() -> Family:
    """Sentiment from embeddings (mean of n-grams and an MLP; fastText, Joulin et al., 2016) of rated words."""
    return Family(
        name="Sentiment",
        data="words rated by people (VADER lexicon)",
        metric="accuracy, %",
        modules={MODEL: Classifier()},
        losses={MODEL: stateless(lambda models, batch: cross_entropy(models(batch["grams"]), batch["label"]))},
        example=lambda batch: {MODEL: (batch["grams"],)},
        batch=lambda rng: draw(rng, words()[0], 128),
        test=lambda: words()[1],
        predict=lambda models, test: jnp.argmax(models(test["grams"]), -1),
        score=accuracy,
        optimizer=adam(1e-2),
        steps=300,
    )


NODES, NEIGHBOURS, LABELS = 900, 6, 5


class GraphSAGE(nn.Module):
    """Each layer adds the mean of the neighbours' messages to a node's own."""

    @nn.compact
    def __call__(self, nodes: jax.Array, edges: jax.Array) -> jax.Array:
        source, target = edges
        x = nodes
        for width in (48, 10):
            sums = jax.ops.segment_sum(nn.Dense(width)(x)[source], target, NODES)
            degree = jax.ops.segment_sum(jnp.ones(target.shape), target, NODES)
            x = nn.Dense(width)(x) + sums / jnp.maximum(degree, 1)[:, None]
            x = nn.relu(x) if width > 10 else x
        return x


@functools.cache
def neighbours() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels and labels of the digits, and edges [2, n] from each one's nearest neighbours."""
    from sklearn.neighbors import kneighbors_graph

    part = digits(NODES)[0]
    nodes = part["image"].reshape(NODES, -1)
    found = kneighbors_graph(nodes, NEIGHBOURS).tocoo()
    return nodes, part["label"], np.stack([found.col, found.row]).astype(np.int32)


@functools.cache
def known() -> np.ndarray:
    """The nodes whose labels are known: the first five of each class."""
    labels = neighbours()[1]
    mask = np.zeros(NODES, bool)
    mask[[i for c in range(10) for i in np.flatnonzero(labels == c)[:LABELS]]] = True
    return mask


def graph_batch(rng: np.random.Generator) -> Batch:
    """The graph with half of its edges, another half for each step, and noise on the nodes."""
    nodes, labels, edges = neighbours()
    kept = rng.permutation(edges.shape[1])[: edges.shape[1] // 2]
    noise = rng.normal(0, 0.3, nodes.shape).astype(np.float32)
    return {"nodes": nodes + noise, "edges": edges[:, kept], "label": labels, "known": known()}


def unlabelled() -> Batch:
    nodes, labels, edges = neighbours()
    return {"nodes": nodes, "edges": edges, "label": labels[~known()]}


def graph_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = models(batch["nodes"], batch["edges"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.sum(jnp.where(batch["known"], each, 0.0)) / jnp.sum(batch["known"]), {}


def graph() -> Family:
    """Graph network (GraphSAGE, Hamilton et al., 2017): labels of digits by their neighbours, five labels a class."""
    return Family(
        name="Graph network",
        data="neighbours among 900 digits (scikit-learn), 50 labels known",
        metric="accuracy, %",
        modules={MODEL: GraphSAGE()},
        losses={MODEL: graph_loss},
        example=lambda batch: {MODEL: (batch["nodes"], batch["edges"])},
        batch=graph_batch,
        test=unlabelled,
        predict=lambda models, test: jnp.argmax(models(test["nodes"], test["edges"]), -1)[~known()],
        score=accuracy,
        optimizer=adam(1e-2),
        steps=120,
    )
