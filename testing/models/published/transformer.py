"""The transformer layers that BERT and GPT share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class SelfAttention(nn.Module):
    """Multi-head attention over x [batch, length, features].

    Args:
        heads: Number of heads.
        causal: Whether a position sees only those before it.
        fused: Run cuDNN's fused attention, in this dtype (it has no float32); None: `nn.dot_product_attention`.
        dtype: As of `nn.Dense`.
    """

    heads: int
    causal: bool = False
    fused: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        batch, length, features = x.shape
        qkv = nn.Dense(3 * features, dtype=self.dtype, name="qkv")(x)
        q, k, v = jnp.split(qkv.reshape(batch, length, 3 * self.heads, features // self.heads), 3, axis=2)
        if self.fused is not None:
            y = jax.nn.dot_product_attention(
                *(a.astype(self.fused) for a in (q, k, v)),
                is_causal=self.causal,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                implementation="cudnn",
            ).astype(x.dtype)
        else:
            mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
            if lengths is not None:
                mask = (jnp.arange(length) < lengths[:, None])[:, None, None, :]
            y = nn.dot_product_attention(q, k, v, mask=mask, dtype=self.dtype)
        return nn.Dense(features, dtype=self.dtype, name="out")(y.reshape(x.shape))


class Block(nn.Module):
    """Attention and an MLP, each with its norm: before it (GPT-2) or after the sum (BERT)."""

    heads: int
    pre_norm: bool
    causal: bool = False
    fused: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        attend = SelfAttention(self.heads, self.causal, self.fused, self.dtype, name="attention")
        norms = [nn.LayerNorm(dtype=self.dtype, name=name) for name in ("attention_norm", "mlp_norm")]

        def mlp(y: jax.Array) -> jax.Array:
            y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype, name="up")(y))
            return nn.Dense(x.shape[-1], dtype=self.dtype, name="down")(y)

        if self.pre_norm:
            x = x + attend(norms[0](x), lengths)
            return x + mlp(norms[1](x))
        x = norms[0](x + attend(x, lengths))
        return norms[1](x + mlp(x))


def stack(block: Callable[..., Block], layers: int, loop: bool, x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """The blocks, written out or as one `scan` over their stacked parameters."""
    if not loop:
        for i in range(layers):
            x = block(name=f"block_{i}")(x, lengths)
        return x

    def layer(module: Block, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return module(x, lengths), None

    scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
    return scanned(block(name="blocks"), x, None)[0]


class WideEmbed(nn.Embed):
    """An `nn.Embed` that looks up in float32 and casts the result: the gradient of its table is summed in float32."""

    def __call__(self, inputs: jax.Array) -> jax.Array:
        return jnp.take(self.embedding, inputs, axis=0).astype(self.dtype)


class Layers(nn.Module):
    """Blocks of one width, which a subclass calls; the fields are the same in all models."""

    features: int
    layers: int
    heads: int
    pre_norm: bool = True
    causal: bool = False
    remat: bool = False
    loop: bool = False
    fused: Any = None
    dtype: Any = None

    def run(self, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """The blocks, in a compact method, and the last norm."""
        kind = nn.remat(Block, prevent_cse=not self.loop) if self.remat else Block
        block = partial(kind, self.heads, self.pre_norm, self.causal, self.fused, self.dtype)
        x = stack(block, self.layers, self.loop, x, lengths)
        return nn.LayerNorm(dtype=self.dtype, name="final_norm")(x) if self.pre_norm else x


class Encoder(Layers):
    """Token and position embeddings, and the blocks; returns the embedding table's module too, for tied heads."""

    vocabulary: int = 0
    segments: int = 0
    wide_embeddings: bool = False

    def encode(
        self, tokens: jax.Array, segments: jax.Array | None = None, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, nn.Embed]:
        embed = WideEmbed if self.wide_embeddings else nn.Embed
        embedding = embed(self.vocabulary, self.features, dtype=self.dtype, name="tokens")
        positions = embed(tokens.shape[1], self.features, dtype=self.dtype, name="positions")
        x = embedding(tokens) + positions(jnp.arange(tokens.shape[1]))
        if segments is not None:
            x = x + embed(self.segments, self.features, dtype=self.dtype, name="segments")(segments)
        if not self.pre_norm:
            x = nn.LayerNorm(dtype=self.dtype, name="embedding_norm")(x)
        return self.run(x, lengths), embedding
