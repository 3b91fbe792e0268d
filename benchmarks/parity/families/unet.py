"""U-Net (Ronneberger et al., 2015): which of three photographed textures each pixel of a mosaic shows."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, cross_entropy
from benchmarks.parity.sources import package_file

STEPS, SIDE, TEXTURES = 150, 32, ("brick", "grass", "gravel")


class UNet(nn.Module):
    features: tuple[int, ...] = (8, 16)  # of each level above the lowest

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        skipped = []
        for features in self.features:
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(features, (3, 3))(x)))
            skipped.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.GroupNorm(4)(nn.Conv(32, (3, 3))(x)))
        for skip in reversed(skipped):
            x = nn.ConvTranspose(skip.shape[-1], (2, 2), (2, 2))(x)
            x = nn.relu(nn.GroupNorm(4)(nn.Conv(skip.shape[-1], (3, 3))(jnp.concatenate([x, skip], -1))))
        return nn.Conv(len(TEXTURES), (1, 1))(x)


@functools.cache
def photographs(train: bool) -> tuple[np.ndarray, ...]:
    """Textures of mean 0 and deviation 1 at half resolution; the right quarter of each is held out."""
    import skimage.io

    found = []
    for name in TEXTURES:
        image = skimage.io.imread(package_file("skimage", "data", f"{name}.png"))[::2, ::2].astype(np.float32)
        image = (image - image.mean()) / image.std()
        split = image.shape[1] * 3 // 4
        found.append(image[:, :split] if train else image[:, split:])
    return tuple(found)


def mosaics(rng: np.random.Generator, count: int, train: bool = True) -> Batch:
    """Images split into three sectors, each of a texture, with noise and a random contrast."""
    images, labels = np.zeros((count, SIDE, SIDE, 1), np.float32), np.zeros((count, SIDE, SIDE), np.int32)
    y, x = np.mgrid[:SIDE, :SIDE]
    for image, label in zip(images, labels, strict=True):
        cy, cx = rng.uniform(8, SIDE - 8, 2)
        angle = np.arctan2(y - cy, x - cx) + rng.uniform(0, 2 * np.pi)
        label[:] = rng.permutation(3)[(angle // (2 * np.pi / 3)).astype(int) % 3]
        for k, texture in enumerate(photographs(train)):
            top, left = (int(rng.integers(size - SIDE)) for size in texture.shape)
            image[label == k, 0] = texture[top : top + SIDE, left : left + SIDE][label == k]
        image[:] = image * rng.uniform(0.7, 1.4) + rng.normal(0, 0.3, image.shape)
    return {"image": images, "label": labels}


@functools.cache
def held_out() -> Batch:
    return mosaics(np.random.default_rng(0), 96, train=False)


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    return cross_entropy(models(batch["image"]), batch["label"]), {}


def mean_iou(predicted: np.ndarray, test: Batch) -> float:
    """Intersection over union of the classes' pixels, their mean in percent."""
    found, true = np.asarray(predicted), test["label"]
    ratios = [((found == k) & (true == k)).sum() / ((found == k) | (true == k)).sum() for k in range(len(TEXTURES))]
    return 100 * float(np.mean(ratios))


FAMILY = Family(
    name="U-Net",
    data="mosaics of photographed textures (scikit-image)",
    metric="mean IoU, %",
    modules={MODEL: UNet()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["image"],)},
    batch=lambda rng: mosaics(rng, 8),
    test=held_out,
    predict=lambda models, test: jnp.argmax(models(test["image"]), -1),
    score=mean_iou,
    optimizer=adam(5e-3, STEPS),
    steps=STEPS,
)
