"""ResNet-50 v1.5 at 224² (He et al., 2015, https://arxiv.org/abs/1512.03385; the stride in the 3x3)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import optax

from examples.imagenet.networks import Bottleneck, ResNet

from .workload import ImageWorkload, register


class TrainedResNet(ResNet):
    """The ResNet of the image script, which trains by default."""

    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        return super().__call__(x, train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet50(ImageWorkload):
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    shallow_sizes: ClassVar[dict[str, Any]] = {"batch_size": 64, "stages": (1,)}

    def module(self, dtype: Any = None) -> ResNet:
        return TrainedResNet(self.stages, Bottleneck, self.classes, self.width, dtype)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


register("resnet50", ResNet50(batch_size=256))
