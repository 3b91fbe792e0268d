"""ResNet-50 v1.5 at 224² (He et al., 2015, https://arxiv.org/abs/1512.03385; the stride in the 3x3)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .workload import Batch, Workload, cross_entropy, register


class Bottleneck(nn.Module):
    features: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), self.stride, padding=1)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="shortcut_norm")(conv(4 * self.features, (1, 1), self.stride, name="shortcut")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [batch, side, side, 3] to logits [batch, classes]."""

    stages: tuple[int, ...]
    classes: int
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (7, 7), 2, padding=3, use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(self.stages):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = Bottleneck(self.width * 2**stage, stride, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet50(Workload):
    side: int = 224
    classes: int = 1000
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    examples = "images"
    toy_sizes: ClassVar[dict[str, Any]] = {
        "batch_size": 2,
        "side": 32,
        "classes": 16,
        "stages": (1, 1),
        "width": 8,
    }
    shallow_sizes: ClassVar[dict[str, Any]] = {"batch_size": 64, "stages": (1,)}
    reported_speedup = 3.3

    def module(self, dtype: Any = None) -> ResNet:
        return ResNet(self.stages, self.classes, self.width, dtype)

    def batch(self, key: jax.Array) -> Batch:
        images, labels = jax.random.split(key)
        return {
            "images": jax.random.normal(images, (self.batch_size, self.side, self.side, 3)),
            "labels": jax.random.randint(labels, (self.batch_size,), 0, self.classes),
        }

    def inputs(self, batch: Batch) -> tuple[jax.Array, ...]:
        return (batch["images"],)

    def loss(self, outputs: Any, batch: Batch) -> jax.Array:
        return cross_entropy(outputs, batch["labels"])

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


register("resnet50", ResNet50(batch_size=256))
