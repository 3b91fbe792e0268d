"""Graph network (GraphSAGE, Hamilton et al., 2017): labels of digits by their neighbours, five labels a class."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, accuracy, adam
from benchmarks.parity.sources import digits

STEPS, NODES, NEIGHBOURS, LABELS = 120, 900, 6, 5


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
def graph() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixels and labels of the digits, and edges [2, n] from each one's nearest neighbours."""
    from sklearn.neighbors import kneighbors_graph

    part = digits(NODES)[0]
    nodes = part["image"].reshape(NODES, -1)
    found = kneighbors_graph(nodes, NEIGHBOURS).tocoo()
    return nodes, part["label"], np.stack([found.col, found.row]).astype(np.int32)


@functools.cache
def known() -> np.ndarray:
    """The nodes whose labels are known: the first five of each class."""
    labels = graph()[1]
    mask = np.zeros(NODES, bool)
    mask[[i for c in range(10) for i in np.flatnonzero(labels == c)[:LABELS]]] = True
    return mask


def batch(rng: np.random.Generator) -> Batch:
    """The graph with half of its edges, another half for each step, and noise on the nodes."""
    nodes, labels, edges = graph()
    kept = rng.permutation(edges.shape[1])[: edges.shape[1] // 2]
    noise = rng.normal(0, 0.3, nodes.shape).astype(np.float32)
    return {"nodes": nodes + noise, "edges": edges[:, kept], "label": labels, "known": known()}


@functools.cache
def held_out() -> Batch:
    nodes, labels, edges = graph()
    return {"nodes": nodes, "edges": edges, "label": labels[~known()]}


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits = models(batch["nodes"], batch["edges"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.sum(jnp.where(batch["known"], each, 0.0)) / jnp.sum(batch["known"]), {}


FAMILY = Family(
    name="Graph network",
    data="neighbours among 900 digits (scikit-learn), 50 labels known",
    metric="accuracy, %",
    modules={MODEL: GraphSAGE()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["nodes"], batch["edges"])},
    batch=batch,
    test=held_out,
    predict=lambda models, test: jnp.argmax(models(test["nodes"], test["edges"]), -1)[~known()],
    score=accuracy,
    optimizer=adam(1e-2, STEPS),
    steps=STEPS,
)
