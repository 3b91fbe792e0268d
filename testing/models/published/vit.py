"""ViT-B/16 and ViT-L/16 at 224² (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929), with mean pooling."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from .transformer import Layers
from .workload import ImageWorkload, TransformerWorkload, register


class VisionTransformer(Layers):
    """Images [batch, side, side, 3] to logits [batch, classes]."""

    classes: int = 1000
    patch: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = (self.patch, self.patch)
        x = nn.Conv(self.features, size, size, dtype=self.dtype, name="patches")(x)
        x = x.reshape(x.shape[0], -1, self.features)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
        x = jnp.mean(self.run(x), axis=1)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vit(TransformerWorkload, ImageWorkload):
    patch: int = 16
    features: int = 768
    layers: int = 12
    heads: int = 12
    model = VisionTransformer
    shallow_sizes: ClassVar[dict[str, Any]] = {"layers": 6}


register("vit_b16", Vit(batch_size=128))
register("vit_l16", Vit(batch_size=64, features=1024, layers=24, heads=16))
