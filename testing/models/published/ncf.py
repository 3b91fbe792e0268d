"""Neural collaborative filtering (He et al., 2017, https://arxiv.org/abs/1708.05031) at MovieLens-20M's sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .workload import Batch, Workload, register


class NeuMF(nn.Module):
    """Users and items [batch] to logits [batch]: a factorisation and an MLP, side by side."""

    users: int
    items: int
    factors: int
    widths: tuple[int, ...]
    dtype: Any = None

    @nn.compact
    def __call__(self, users: jax.Array, items: jax.Array) -> jax.Array:
        def embed(count: int, features: int, index: jax.Array, name: str) -> jax.Array:
            return nn.Embed(count, features, dtype=self.dtype, name=name)(index)

        half = self.widths[0] // 2
        factors = embed(self.users, self.factors, users, "user_factors")
        factors = factors * embed(self.items, self.factors, items, "item_factors")
        x = jnp.concatenate([embed(self.users, half, users, "user"), embed(self.items, half, items, "item")], -1)
        for width in self.widths[1:]:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype, name="head")(jnp.concatenate([factors, x], -1))[:, 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ncf(Workload):
    """`widths` of the MLP, beginning with that of its input."""

    users: int = 138_496
    items: int = 26_744
    factors: int = 64
    widths: tuple[int, ...] = (256, 256, 128, 64)
    model = NeuMF
    arguments = ("users", "items")

    def batch(self, key: jax.Array) -> Batch:
        keys = jax.random.split(key, 3)
        shape = (self.batch_size,)
        return {
            "users": jax.random.randint(keys[0], shape, 0, self.users),
            "items": jax.random.randint(keys[1], shape, 0, self.items),
            "likes": jax.random.bernoulli(keys[2], 0.2, shape).astype(jnp.float32),
        }

    def loss(self, outputs: Any, batch: Batch) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(outputs.astype(jnp.float32), batch["likes"]).mean()


register("ncf", Ncf(batch_size=2**20))
