"""Mask R-CNN (He et al., 2017): RoIAlign, class and mask heads on given regions; without the region proposals."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam
from benchmarks.parity.scenes import CLASSES, OBJECTS, SIDE, scenes

STEPS, CROP, MASK = 200, 6, 12


def roi_align(features: jax.Array, boxes: jax.Array) -> jax.Array:
    """Bilinear samples of [n, h, w, c] at the CROP×CROP cell centres of each of [n, k] boxes of the image."""
    scale = features.shape[1] / SIDE
    cells = (jnp.arange(CROP) + 0.5) / CROP
    places = boxes[..., None, :2] * (1 - cells[:, None]) + boxes[..., None, 2:] * cells[:, None]
    distance = jnp.abs(places[..., None] * scale - 0.5 - jnp.arange(features.shape[1]))  # [n, k, cell, y or x, place]
    weights = jnp.maximum(1 - distance, 0)
    return jnp.einsum("nkah,nkbw,nhwc->nkabc", weights[:, :, :, 0], weights[:, :, :, 1], features)


class MaskRCNN(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array, boxes: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Conv(16, (3, 3))(image))
        x = nn.relu(nn.Conv(32, (3, 3), 2)(x))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        crops = roi_align(x, boxes).reshape(-1, CROP, CROP, 32)
        hidden = nn.relu(nn.Dense(64)(crops.reshape(len(crops), -1)))
        masks = nn.relu(nn.ConvTranspose(16, (2, 2), (2, 2))(nn.relu(nn.Conv(32, (3, 3))(crops))))
        return nn.Dense(CLASSES)(hidden), nn.Conv(1, (1, 1))(masks)[..., 0]


def regions(rng: np.random.Generator, count: int, train: bool = True) -> Batch:
    """Scenes with proposals near their objects, and what is in each proposal."""
    scene = scenes(rng, count, train)
    boxes = scene["box"] + rng.normal(0, 1.0, scene["box"].shape).astype(np.float32)
    cells = (np.arange(MASK) + 0.5) / MASK
    places = boxes[..., None, :2] * (1 - cells[:, None]) + boxes[..., None, 2:] * cells[:, None]
    y, x = np.moveaxis(np.clip(places.astype(int), 0, SIDE - 1), -1, 0)
    which = np.ogrid[:count, :OBJECTS]
    inside = scene["mask"][which[0][..., None, None], which[1][..., None, None], y[..., None], x[..., None, :]]
    present = scene["label"].ravel() >= 0
    return {
        "image": scene["image"],
        "box": boxes,
        "label": np.maximum(scene["label"].ravel(), 0),
        "mask": inside.reshape(-1, MASK, MASK).astype(np.float32),
        "present": present.astype(np.float32),
    }


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    classes, masks = models(batch["image"], batch["box"])
    each = optax.softmax_cross_entropy_with_integer_labels(classes, batch["label"])
    each += jnp.mean(optax.sigmoid_binary_cross_entropy(masks, batch["mask"]), (1, 2))
    return jnp.sum(each * batch["present"]) / jnp.sum(batch["present"]), {}


@functools.cache
def held_out() -> Batch:
    return regions(np.random.default_rng(0), 192, train=False)


def mask_iou(masks: np.ndarray, test: Batch) -> float:
    """Mean intersection over union of the masks, in percent."""
    found, true = np.asarray(masks) > 0, test["mask"] > 0
    known = (test["present"] > 0) & true.any((1, 2))
    shared, either = (found & true).sum((1, 2)), (found | true).sum((1, 2))
    return 100 * float(np.mean(shared[known] / either[known]))


FAMILY = Family(
    name="Mask R-CNN heads",
    data="generated scenes of digits (scikit-learn), regions given",
    metric="mask IoU, %",
    modules={MODEL: MaskRCNN()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["image"], batch["box"])},
    batch=lambda rng: regions(rng, 16),
    test=held_out,
    predict=lambda models, test: models(test["image"], test["box"])[1],
    score=mask_iou,
    optimizer=adam(3e-3, STEPS, clip=5.0),
    steps=STEPS,
)
