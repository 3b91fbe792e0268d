"""Object detection in generated scenes of digits."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam
from benchmarks.parity.scenes import CLASSES, OBJECTS, SIDE, detector, scenes


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


def ssd_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
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


def ssd() -> Family:
    """SSD (Liu et al., 2016; two feature maps, hard negative mining) on scenes of handwritten digits."""
    return detector("SSD", SSD(), ssd_loss, lambda logits: jax.nn.softmax(logits)[..., :CLASSES], 3e-3)


CROP, MASK = 6, 12


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


def mask_rcnn_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    classes, masks = models(batch["image"], batch["box"])
    each = optax.softmax_cross_entropy_with_integer_labels(classes, batch["label"])
    each += jnp.mean(optax.sigmoid_binary_cross_entropy(masks, batch["mask"]), (1, 2))
    return jnp.sum(each * batch["present"]) / jnp.sum(batch["present"]), {}


def mask_iou(masks: np.ndarray, test: Batch) -> float:
    """Mean intersection over union of the masks, in percent."""
    found, true = np.asarray(masks) > 0, test["mask"] > 0
    known = (test["present"] > 0) & true.any((1, 2))
    shared, either = (found & true).sum((1, 2)), (found | true).sum((1, 2))
    return 100 * float(np.mean(shared[known] / either[known]))


def mask_rcnn() -> Family:
    """Mask R-CNN (He et al., 2017): RoIAlign, class and mask heads on given regions; without the region proposals."""
    return Family(
        name="Mask R-CNN heads",
        data="generated scenes of digits (scikit-learn), regions given",
        metric="mask IoU, %",
        modules={MODEL: MaskRCNN()},
        losses={MODEL: mask_rcnn_loss},
        example=lambda batch: {MODEL: (batch["image"], batch["box"])},
        batch=lambda rng: regions(rng, 16),
        test=lambda: regions(np.random.default_rng(0), 192, train=False),
        predict=lambda models, test: models(test["image"], test["box"])[1],
        score=mask_iou,
        optimizer=adam(3e-3, clip=5.0),
        steps=200,
    )


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


def retinanet_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Focal loss over all anchors, by the number of objects, and smooth L1 of their offsets."""
    logits, offsets = models(batch["image"])
    positive = batch["classes"] < CLASSES
    focal = optax.sigmoid_focal_loss(logits, jax.nn.one_hot(batch["classes"], CLASSES), alpha=0.25, gamma=2.0)
    box = jnp.sum(optax.huber_loss(offsets, batch["offsets"]), -1)
    return (jnp.sum(focal) + jnp.sum(jnp.where(positive, box, 0.0))) / jnp.sum(positive), {}


def retinanet() -> Family:
    """RetinaNet (Lin et al., 2017; feature pyramid, shared heads, focal loss) on scenes of handwritten digits."""
    return detector("RetinaNet", RetinaNet(), retinanet_loss, jax.nn.sigmoid, 6e-3)
