"""Top-1 and top-5 accuracy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.imagenet.data import Array

TOP = 5


def correct(logits: Array, labels: Array) -> dict[str, jax.Array]:
    """Whether each image's label is first, and with more than five classes whether it is among the first five.

    Ties are broken by the class, as a stable sort does, so that rounded logits gain nothing.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)[:, None]
    own = jnp.take_along_axis(logits, labels, axis=-1)
    classes = jnp.arange(logits.shape[-1])
    rank = jnp.sum((logits > own) | ((logits == own) & (classes < labels)), axis=-1)
    tops = {"accuracy": 1, **({"top5_accuracy": TOP} if logits.shape[-1] > TOP else {})}
    return {name: (rank < top).astype(jnp.float32) for name, top in tops.items()}
