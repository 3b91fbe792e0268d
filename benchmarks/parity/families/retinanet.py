"""RetinaNet (Lin et al., 2017; feature pyramid, shared heads, focal loss) on scenes of handwritten digits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.parity.family import Batch, Models
from benchmarks.parity.scenes import CLASSES, detector

PRIOR = 4.6  # the logit of 0.01, the prior of an object


class Head(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        classes = nn.Conv(CLASSES, (3, 3), bias_init=nn.initializers.constant(-PRIOR))(x)
        return jnp.concatenate([classes, nn.Conv(4, (3, 3))(x)], -1).reshape(len(x), -1, CLASSES + 4)


class RetinaNet(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Conv(16, (3, 3), 2)(image))
        fine = nn.relu(nn.Conv(32, (3, 3), 2)(x))
        coarse = nn.Conv(32, (1, 1))(nn.relu(nn.Conv(48, (3, 3), 2)(fine)))
        pyramid = nn.Conv(32, (1, 1))(fine) + jnp.repeat(jnp.repeat(coarse, 2, 1), 2, 2)
        head = Head()
        x = jnp.concatenate([head(pyramid), head(coarse)], 1)
        return x[..., :CLASSES], x[..., CLASSES:]


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Focal loss over all anchors, by the number of objects, and smooth L1 of their offsets."""
    logits, offsets = models(batch["image"])
    positive = batch["classes"] < CLASSES
    focal = optax.sigmoid_focal_loss(logits, jax.nn.one_hot(batch["classes"], CLASSES), alpha=0.25, gamma=2.0)
    box = jnp.sum(optax.huber_loss(offsets, batch["offsets"]), -1)
    return (jnp.sum(focal) + jnp.sum(jnp.where(positive, box, 0.0))) / jnp.sum(positive), {}


FAMILY = detector("RetinaNet", RetinaNet(), loss, jax.nn.sigmoid, 6e-3)
