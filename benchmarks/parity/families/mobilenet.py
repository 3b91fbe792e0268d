"""MobileNet (Howard et al., 2017; depthwise separable convolutions, ReLU6) on handwritten digits."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.parity.families.resnet import of_digits


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


FAMILY = of_digits("MobileNet", MobileNet())
