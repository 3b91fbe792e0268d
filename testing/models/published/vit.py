"""ViT-B/16 and ViT-L/16 at 224² (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929), with mean pooling."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from .transformer import Block, stack
from .workload import ImageWorkload, register


class VisionTransformer(nn.Module):
    """Images [batch, side, side, 3] to logits [batch, classes]."""

    classes: int
    patch: int
    features: int
    layers: int
    heads: int
    remat: bool = False
    loop: bool = False
    fused: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        size = (self.patch, self.patch)
        x = nn.Conv(self.features, size, size, dtype=self.dtype, name="patches")(x)
        x = x.reshape(x.shape[0], -1, self.features)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
        kind = nn.remat(Block, prevent_cse=not self.loop) if self.remat else Block
        block = partial(kind, self.heads, True, fused=self.fused, dtype=self.dtype)
        x = stack(block, self.layers, self.loop, x, None)
        x = jnp.mean(nn.LayerNorm(dtype=self.dtype, name="final_norm")(x), axis=1)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vit(ImageWorkload):
    patch: int = 16
    features: int = 768
    layers: int = 12
    heads: int = 12
    remat: bool = False
    loop: bool = False
    fused: Any = None
    model = VisionTransformer
    shallow_sizes: ClassVar[dict[str, Any]] = {"layers": 6}


register("vit_b16", Vit(batch_size=128))
register("vit_l16", Vit(batch_size=64, features=1024, layers=24, heads=16))
