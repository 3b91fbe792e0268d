"""T5 (Raffel et al., 2020, https://arxiv.org/abs/1910.10683): attention with learned biases by relative position."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .workload import Batch, Workload, register

BUCKETS, FARTHEST = 32, 128


def buckets(queries: int, keys: int, causal: bool) -> np.ndarray:
    """The bucket of each key's position relative to each query's: one each nearby, wider ones farther away."""
    distance = np.arange(queries)[:, None] - np.arange(keys)
    count = BUCKETS if causal else BUCKETS // 2
    offset = np.zeros_like(distance) if causal else np.where(distance < 0, count, 0)
    distance = np.maximum(distance, 0) if causal else np.abs(distance)
    near = count // 2
    far = near + np.log(np.maximum(distance, 1) / near) / np.log(FARTHEST / near) * (count - near)
    return offset + np.where(distance < near, distance, np.minimum(far.astype(int), count - 1))


class RelativeBias(nn.Module):
    """A bias [1, heads, queries, keys] of the scores, which all layers share."""

    heads: int
    causal: bool

    @nn.compact
    def __call__(self, queries: int, keys: int) -> jax.Array:
        table = self.param("table", nn.initializers.normal(), (BUCKETS, self.heads))
        bias = table[buckets(queries, keys, self.causal)].transpose(2, 0, 1)[None]
        if self.causal:
            bias = jnp.where(jnp.tril(jnp.ones((queries, keys), bool)), bias, jnp.finfo(jnp.float32).min)
        return bias


class Attention(nn.Module):
    """Attention of x to y, without a scale of the scores."""

    heads: int
    fused: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array, bias: jax.Array | None) -> jax.Array:
        features = x.shape[-1]

        def project(z: jax.Array, name: str) -> jax.Array:
            z = nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)(z)
            return z.reshape(*z.shape[:2], self.heads, -1)

        q, k, v = project(x, "q"), project(y, "k"), project(y, "v")
        if self.fused is not None:
            q, k, v = (a.astype(self.fused) for a in (q, k, v))
            half = None if bias is None else jnp.maximum(bias, jnp.finfo(self.fused).min).astype(self.fused)
            out = jax.nn.dot_product_attention(q, k, v, half, scale=1.0, implementation="cudnn").astype(x.dtype)
        else:
            scores = jnp.einsum("bthd,bshd->bhts", q, k)
            scores = scores if bias is None else scores + bias.astype(scores.dtype)
            out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
        return nn.Dense(features, use_bias=False, dtype=self.dtype, name="o")(out.reshape(x.shape))


class Block(nn.Module):
    """Attention, in a decoder also to the encoder's result, and an MLP."""

    heads: int
    hidden: int
    fused: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, bias: jax.Array, encoded: jax.Array | None = None) -> jax.Array:
        def norm(x: jax.Array, name: str) -> jax.Array:
            return nn.RMSNorm(dtype=self.dtype, name=f"{name}_norm")(x)

        y = norm(x, "attention")
        x = x + Attention(self.heads, self.fused, self.dtype, name="attention")(y, y, bias)
        if encoded is not None:
            cross = Attention(self.heads, self.fused, self.dtype, name="cross")
            x = x + cross(norm(x, "cross"), encoded, None)
        y = nn.relu(nn.Dense(self.hidden, use_bias=False, dtype=self.dtype, name="up")(norm(x, "mlp")))
        return x + nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype, name="down")(y)


class EncoderDecoder(nn.Module):
    """Tokens [batch, length] and those of the target so far to logits of the target."""

    vocabulary: int
    features: int
    hidden: int
    layers: int
    heads: int
    fused: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array, target: jax.Array) -> jax.Array:
        embedding = nn.Embed(self.vocabulary, self.features, dtype=self.dtype, name="tokens")

        def stack(x: jax.Array, name: str, encoded: jax.Array | None = None) -> jax.Array:
            bias = RelativeBias(self.heads, encoded is not None, name=f"{name}_bias")(x.shape[1], x.shape[1])
            for i in range(self.layers):
                x = Block(self.heads, self.hidden, self.fused, self.dtype, name=f"{name}_{i}")(x, bias, encoded)
            return nn.RMSNorm(dtype=self.dtype, name=f"{name}_norm")(x)

        encoded = stack(embedding(tokens), "encoder")
        decoded = stack(embedding(target), "decoder", encoded)
        return embedding.attend(decoded * self.features**-0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5(Workload):
    """The sizes of T5-base; the vocabulary is that of its checkpoints."""

    length: int = 512
    target: int = 128
    features: int = 768
    hidden: int = 3072
    layers: int = 12
    heads: int = 12
    vocabulary: int = 32128
    fused: Any = None
    model = EncoderDecoder
    arguments = ("tokens", "target")
    shallow_sizes: ClassVar[dict[str, Any]] = {"layers": 2}

    def batch(self, key: jax.Array) -> Batch:
        keys = jax.random.split(key)
        text = jax.random.randint(keys[1], (self.batch_size, self.target + 1), 0, self.vocabulary)
        tokens = jax.random.randint(keys[0], (self.batch_size, self.length), 0, self.vocabulary)
        return {"tokens": tokens, "target": text[:, :-1], "labels": text[:, 1:]}


register("t5_base", T5(batch_size=32))
