"""Scenes of real handwritten digits for detection: images, boxes, anchors, and the average precision."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Loss, Models, adam
from benchmarks.parity.sources import digits

SIDE, OBJECTS, CLASSES = 32, 3, 10
SIZES = (8, 14)  # of the digits, and of the anchors at strides 4 and 8
Scene = dict[str, np.ndarray]


@functools.cache
def _ink(train: bool) -> Scene:
    part = digits(1200)[0 if train else 1]
    image = part["image"] - part["image"].min()
    return {"image": image / image.max(), "label": part["label"]}


def scenes(rng: np.random.Generator, count: int, train: bool = True) -> Scene:
    """Images [n, 32, 32, 1] of one to three digits of two sizes with boxes (y0, x0, y1, x1), labels and their masks.

    A label of -1 marks a missing object.
    """
    ink = _ink(train)
    image = np.abs(rng.normal(0, 0.15, (count, SIDE, SIDE, 1))).astype(np.float32)
    masks = np.zeros((count, OBJECTS, SIDE, SIDE), bool)
    boxes = np.zeros((count, OBJECTS, 4), np.float32)
    labels = np.full((count, OBJECTS), -1, np.int32)
    for n in range(count):
        for k in range(rng.integers(1, OBJECTS + 1)):
            size, which = int(rng.choice(SIZES)), int(rng.integers(len(ink["label"])))
            y, x = (int(v) for v in rng.integers(SIDE - size + 1, size=2))
            box = np.array([y, x, y + size, x + size], np.float32)
            if k and overlaps(boxes[n, :k], box[None]).max() > 0.1:
                continue
            pixels = (np.arange(size) * 8) // size
            digit = ink["image"][which, pixels][:, pixels, 0]
            place = slice(y, y + size), slice(x, x + size)
            image[n, *place, 0] = np.maximum(image[n, *place, 0], digit)
            masks[n, k][place] = digit > 0.3
            boxes[n, k], labels[n, k] = box, ink["label"][which]
    return {"image": image, "box": boxes, "label": labels, "mask": masks}


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of every box of `a` with every box of `b`."""
    low, high = np.maximum(a[:, None, :2], b[None, :, :2]), np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(-1)
    area = (a[:, 2:] - a[:, :2]).prod(-1)[:, None] + (b[:, 2:] - b[:, :2]).prod(-1)[None]
    return shared / np.maximum(area - shared, 1e-6)


@functools.cache
def anchors() -> np.ndarray:
    """One anchor per cell of the 8×8 and the 4×4 feature map: [80, 4]."""
    found = []
    for stride, size in zip((4, 8), SIZES, strict=True):
        centre = np.arange(SIDE // stride) * stride + stride / 2
        y, x = (grid.ravel() for grid in np.meshgrid(centre, centre, indexing="ij"))
        found.append(np.stack([y - size / 2, x - size / 2, y + size / 2, x + size / 2], -1))
    return np.concatenate(found).astype(np.float32)


def with_targets(scene: Scene) -> Scene:
    """The images and the anchors' targets: a class (10: background) and offsets, by overlap of 0.5 or the best one."""
    sizes = (anchors()[:, 2:] - anchors()[:, :2]).astype(np.float32)
    classes = np.full((len(scene["image"]), len(sizes)), CLASSES, np.int32)
    offsets = np.zeros((*classes.shape, 4), np.float32)
    for n, (boxes, labels) in enumerate(zip(scene["box"], scene["label"], strict=True)):
        boxes, labels = boxes[labels >= 0], labels[labels >= 0]
        overlap = overlaps(anchors(), boxes)
        overlap[overlap.argmax(0), np.arange(len(boxes))] = 1.0
        which, taken = overlap.argmax(1), overlap.max(1) >= 0.5
        classes[n, taken] = labels[which[taken]]
        offsets[n, taken] = ((boxes[which] - anchors()) / np.tile(sizes, 2))[taken]
    return {"image": scene["image"], "classes": classes, "offsets": offsets}


def average_precision(predicted: tuple[np.ndarray, np.ndarray], test: Scene) -> float:
    """Mean average precision over the classes at an overlap of 0.5, in percent.

    Args:
        predicted: Scores [n, 80, 10] and offsets [n, 80, 4].
        test: The scenes.
    """
    scores, offsets = (np.asarray(x, np.float32) for x in predicted)
    boxes = anchors() + offsets * np.tile(anchors()[:, 2:] - anchors()[:, :2], 2)
    return 100 * float(np.mean([_of_class(scores[..., c], boxes, test, c) for c in range(CLASSES)]))


def _of_class(scores: np.ndarray, boxes: np.ndarray, test: Scene, label: int) -> float:
    found: list[tuple[float, bool]] = []
    total = int((test["label"] == label).sum())
    for n in range(len(scores)):
        truth = test["box"][n][test["label"][n] == label]
        missed = np.ones(len(truth), bool)
        for i in _suppressed(scores[n], boxes[n]):
            overlap = overlaps(boxes[n][i][None], truth)[0] * missed
            hit = bool(len(truth)) and overlap.max() >= 0.5
            if hit:
                missed[overlap.argmax()] = False
            found.append((scores[n, i], hit))
    hits = np.array([hit for _, hit in sorted(found, key=lambda pair: -pair[0])], float)
    precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    return float((best * hits).sum() / total)


def _suppressed(scores: np.ndarray, boxes: np.ndarray) -> list[int]:
    """The best six boxes that do not overlap a better one, of the best 24."""
    kept: list[int] = []
    for i in np.argsort(-scores)[:24]:
        if len(kept) < 6 and (not kept or overlaps(boxes[i][None], boxes[kept]).max() < 0.5):
            kept.append(int(i))
    return kept


def detector(name: str, model: nn.Module, loss: Loss, scores: Callable[[jax.Array], jax.Array], peak: float) -> Family:
    """The family of a detector.

    Args:
        name: As in `Family`.
        model: Maps images to the logits of anchors and their offsets.
        loss: As in `Family`.
        scores: Maps logits to the scores of classes.
        peak: Largest learning rate.
    """

    def predict(models: Models, test: Batch) -> tuple[jax.Array, jax.Array]:
        logits, offsets = models(test["image"])
        return scores(logits), offsets

    return Family(
        name=name,
        data="generated scenes of digits (scikit-learn)",
        metric="mAP at 0.5, %",
        modules={MODEL: model},
        losses={MODEL: loss},
        example=lambda batch: {MODEL: (batch["image"],)},
        batch=lambda rng: with_targets(scenes(rng, 16)),
        test=lambda: scenes(np.random.default_rng(0), 192, train=False),  # of digits that no training scene has
        predict=predict,
        score=average_precision,
        optimizer=adam(peak, clip=5.0),
        steps=250,
    )
