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
    """Users and items [...] to logits [...]: a factorisation and an MLP, side by side."""

    users: int
    items: int
    factors: int
    widths: tuple[int, ...]
    dtype: Any = None

    @nn.compact
    def __call__(self, users: jax.Array, items: jax.Array) -> jax.Array:
        def embed(features: int) -> tuple[jax.Array, jax.Array]:
            tables = [nn.Embed(count, features, dtype=self.dtype) for count in (self.users, self.items)]
            return tables[0](users), tables[1](items)

        of_user, of_item = embed(self.factors)
        x = jnp.concatenate(embed(self.widths[0] // 2), -1)
        for width in self.widths[1:]:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(1, dtype=self.dtype)(jnp.concatenate([of_user * of_item, x], -1))[..., 0]


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
