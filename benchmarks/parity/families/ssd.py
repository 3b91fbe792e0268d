"""SSD (Liu et al., 2016; two feature maps, hard negative mining) on scenes of handwritten digits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.parity.family import Batch, Models
from benchmarks.parity.scenes import CLASSES, detector


class SSD(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Conv(16, (3, 3), 2)(image))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        fine = nn.relu(nn.Conv(48, (3, 3), 2)(x))
        coarse = nn.relu(nn.Conv(48, (3, 3), 2)(fine))
        outputs = [nn.Conv(CLASSES + 1 + 4, (3, 3))(level) for level in (fine, coarse)]
        x = jnp.concatenate([y.reshape(len(y), -1, CLASSES + 5) for y in outputs], 1)
        return x[..., : CLASSES + 1], x[..., CLASSES + 1 :]


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy of the objects and of the three worst backgrounds for each, smooth L1 of the offsets."""
    logits, offsets = models(batch["image"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["classes"])
    positive = batch["classes"] < CLASSES
    count = jnp.sum(positive, 1, keepdims=True)
    background = jnp.where(positive, -jnp.inf, jax.lax.stop_gradient(each))
    order = jnp.argsort(jnp.argsort(-background, 1), 1)
    chosen = positive | (order < 3 * count)
    box = jnp.sum(optax.huber_loss(offsets, batch["offsets"]), -1)
    total = jnp.sum(jnp.where(chosen, each, 0.0)) + jnp.sum(jnp.where(positive, box, 0.0))
    return total / jnp.sum(count), {}


FAMILY = detector("SSD", SSD(), loss, lambda logits: jax.nn.softmax(logits)[..., :CLASSES], 3e-3)
