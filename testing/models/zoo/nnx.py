"""Flax NNX models, made functional by `nnx.split`: params and state are its pytrees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .linen import cross_entropy
from .program import as_is, labelled, program


class MLP(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.inner = nnx.Linear(64, 64, dtype=dtype, rngs=rngs)
        self.outer = nnx.Linear(64, 16, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.silu(self.inner(x)))


@program(has_half=True, flax=True)
def nnx_mlp(key, dtype=None, adapt=as_is):
    graph, params = nnx.split(adapt(MLP(dtype, nnx.Rngs(key))))

    def loss_fn(params, batch):
        return cross_entropy(nnx.merge(graph, params)(batch[0]), batch[1])

    return loss_fn, params, labelled(key, (256, 64))


class ConvNet(nnx.Module):
    """BatchNorm and dropout: statistics and a random stream change inside the call."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.conv = nnx.Conv(8, 16, (3, 3), dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(16, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear(16, 16, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(nnx.relu(self.norm(self.conv(x))))
        return self.dense(jnp.mean(x, (1, 2)))


@program(has_aux=True, has_half=True, flax=True)
def nnx_cnn_batchnorm(key, dtype=None, adapt=as_is):
    graph, params, *others = nnx.split(adapt(ConvNet(dtype, nnx.Rngs(key))), nnx.Param, ...)

    def loss_fn(params, batch):
        inputs, labels, *others = batch
        # A copy, because the state belongs to an outer trace and may not be changed in this one.
        model = nnx.merge(graph, params, *others, copy=True)
        loss = cross_entropy(model(inputs), labels)
        return loss, nnx.split(model, nnx.Param, ...)[2:]

    return loss_fn, params, (*labelled(key, (16, 8, 8, 8)), *others)


class AttentionBlock(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(32, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, 32, decode=False, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


@program(has_half=True, flax=True)
def nnx_scanned_attention(key, dtype=None, adapt=as_is):
    @nnx.vmap(in_axes=0, out_axes=0)
    def blocks(key):
        return adapt(AttentionBlock(dtype, nnx.Rngs(key)))

    graph, params = nnx.split(blocks(jax.random.split(key, 2)))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def apply(x, block):
        return block(x)

    def loss_fn(params, x):
        # In the hand-written form the residual stream starts in half.
        x = x if dtype is None else x.astype(dtype)
        return jnp.mean(apply(x, nnx.merge(graph, params)).astype(jnp.float32) ** 2)

    return loss_fn, params, jax.random.normal(key, (8, 16, 32))
