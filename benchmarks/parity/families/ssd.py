"""SSD (Liu et al., 2016; two feature maps, hard negative mining) on scenes of handwritten digits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam
from benchmarks.parity.scenes import CLASSES, average_precision, held_out, scenes, with_targets

STEPS = 250


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


def predict(models: Models, test: Batch) -> tuple[jax.Array, jax.Array]:
    logits, offsets = models(test["image"])
    return jax.nn.softmax(logits)[..., :CLASSES], offsets


FAMILY = Family(
    name="SSD",
    data="generated scenes of digits (scikit-learn)",
    metric="mAP at 0.5, %",
    modules={MODEL: SSD()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["image"],)},
    batch=lambda rng: with_targets(scenes(rng, 16)),
    test=held_out,
    predict=predict,
    score=average_precision,
    optimizer=adam(3e-3, STEPS, clip=5.0),
    steps=STEPS,
)
