"""Image classification and segmentation."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import (
    MODEL,
    Batch,
    Family,
    accuracy,
    adam,
    classes_of_images,
    classify_images,
    cross_entropy,
    draw,
    stateless,
)
from benchmarks.parity.sources import digits, package_file

TRAIN = 400


class Bottleneck(nn.Module):
    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), self.strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    stages: tuple[tuple[int, int], ...] = ((8, 1), (16, 2), (32, 2))  # features and strides of each block

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(32, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for features, strides in self.stages:
            x = Bottleneck(features, strides)(x, train)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


def of_digits(name: str, model: nn.Module) -> Family:
    """The family of an image classifier on digits."""
    return Family(
        name=name,
        data="digits (scikit-learn), 400 to train",
        metric="accuracy, %",
        modules={MODEL: model},
        losses={MODEL: classify_images},
        example=lambda batch: {MODEL: (batch["image"], True)},
        batch=lambda rng: draw(rng, digits(TRAIN)[0], 32),
        test=lambda: digits(TRAIN)[1],
        predict=classes_of_images,
        score=accuracy,
        optimizer=adam(3e-3),
        steps=150,
    )


def resnet() -> Family:
    """ResNet v1.5 (He et al., 2016; stride in the 3×3 convolution) on handwritten digits."""
    return of_digits("ResNet v1.5", ResNet())


class Separable(nn.Module):
    features: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        channels = x.shape[-1]
        x = nn.Conv(channels, (3, 3), self.strides, feature_group_count=channels, use_bias=False)(x)
        x = nn.relu6(norm()(x))
        return nn.relu6(norm()(nn.Conv(self.features, (1, 1), use_bias=False)(x)))


class MobileNet(nn.Module):
    stages: tuple[tuple[int, int], ...] = ((24, 1), (32, 2), (48, 2))  # features and strides of each block

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu6(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for features, strides in self.stages:
            x = Separable(features, strides)(x, train)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


def mobilenet() -> Family:
    """MobileNet (Howard et al., 2017; depthwise separable convolutions, ReLU6) on handwritten digits."""
    return of_digits("MobileNet", MobileNet())


MOSAIC, TEXTURES = 32, ("brick", "grass", "gravel")


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
    images, labels = np.zeros((count, MOSAIC, MOSAIC, 1), np.float32), np.zeros((count, MOSAIC, MOSAIC), np.int32)
    y, x = np.mgrid[:MOSAIC, :MOSAIC]
    for image, label in zip(images, labels, strict=True):
        cy, cx = rng.uniform(8, MOSAIC - 8, 2)
        angle = np.arctan2(y - cy, x - cx) + rng.uniform(0, 2 * np.pi)
        label[:] = rng.permutation(3)[(angle // (2 * np.pi / 3)).astype(int) % 3]
        for k, texture in enumerate(photographs(train)):
            top, left = (int(rng.integers(size - MOSAIC)) for size in texture.shape)
            image[label == k, 0] = texture[top : top + MOSAIC, left : left + MOSAIC][label == k]
        image[:] = image * rng.uniform(0.7, 1.4) + rng.normal(0, 0.3, image.shape)
    return {"image": images, "label": labels}


def mean_iou(predicted: np.ndarray, test: Batch) -> float:
    """Intersection over union of the classes' pixels, their mean in percent."""
    found, true = np.asarray(predicted), test["label"]
    ratios = [((found == k) & (true == k)).sum() / ((found == k) | (true == k)).sum() for k in range(len(TEXTURES))]
    return 100 * float(np.mean(ratios))


def unet() -> Family:
    """U-Net (Ronneberger et al., 2015): which of three photographed textures each pixel of a mosaic shows."""
    return Family(
        name="U-Net",
        data="mosaics of photographed textures (scikit-image)",
        metric="mean IoU, %",
        modules={MODEL: UNet()},
        losses={MODEL: stateless(lambda models, batch: cross_entropy(models(batch["image"]), batch["label"]))},
        example=lambda batch: {MODEL: (batch["image"],)},
        batch=lambda rng: mosaics(rng, 8),
        test=lambda: mosaics(np.random.default_rng(0), 96, train=False),
        predict=lambda models, test: jnp.argmax(models(test["image"]), -1),
        score=mean_iou,
        optimizer=adam(5e-3),
        steps=150,
    )
