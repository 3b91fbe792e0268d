"""ResNet v1.5 (He et al., 2016; stride in the 3×3 convolution) on handwritten digits."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.parity.family import MODEL, Family, accuracy, adam, classes_of_images, classify_images, draw
from benchmarks.parity.sources import digits

STEPS, TRAIN = 150, 400


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
        optimizer=adam(3e-3, STEPS),
        steps=STEPS,
    )


FAMILY = of_digits("ResNet v1.5", ResNet())
