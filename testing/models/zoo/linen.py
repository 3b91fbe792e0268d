"""Flax Linen models, the most common kind."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .program import as_is, labelled, program


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    """The mean loss, computed in float32 as in hand-written half models."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def classifier(model: nn.Module, key: jax.Array, batch: Any) -> tuple[Any, Any, Any]:
    """The usual loss of a model without state."""

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1])

    return loss_fn, model.init(key, batch[0])["params"], batch


def stateful_classifier(model: nn.Module, key: jax.Array, batch: Any) -> tuple[Any, Any, Any]:
    """The loss of a model with BatchNorm: the new statistics are its auxiliary output."""
    variables = model.init(key, batch[0])

    def loss_fn(params, batch):
        inputs, labels, stats = batch
        logits, new = model.apply({"params": params, "batch_stats": stats}, inputs, mutable=["batch_stats"])
        return cross_entropy(logits, labels), new["batch_stats"]

    return loss_fn, variables["params"], (*batch, variables["batch_stats"])


class MLP(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.Dense(64, dtype=self.dtype)(x))
        return nn.Dense(16, dtype=self.dtype)(x)


@program(has_half=True, flax=True)
def linen_mlp(key, dtype=None, adapt=as_is):
    return classifier(adapt(MLP(dtype)), key, labelled(key, (256, 64)))


class DropoutMLP(nn.Module):
    """LayerNorm, gelu and dropout: a random key is among the inputs."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.LayerNorm(dtype=self.dtype)(x)
            x = nn.gelu(nn.Dense(64, dtype=self.dtype)(x))
            x = nn.Dropout(0.2, deterministic=False)(x)
        return nn.Dense(16, dtype=self.dtype)(x)


@program(has_half=True, flax=True)
def linen_dropout(key, dtype=None, adapt=as_is):
    model, batch = adapt(DropoutMLP(dtype)), labelled(key, (256, 64))
    params = model.init({"params": key, "dropout": key}, batch[0])["params"]

    def loss_fn(params, batch):
        inputs, labels, rng = batch
        return cross_entropy(model.apply({"params": params}, inputs, rngs={"dropout": rng}), labels)

    return loss_fn, params, (*batch, jax.random.key(1))


class ConvNet(nn.Module):
    """Convolution, BatchNorm, pooling of both kinds."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for features in (16, 32):
            x = nn.Conv(features, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return nn.Dense(16, dtype=self.dtype)(x)


@program(has_aux=True, has_half=True, flax=True)
def linen_cnn_batchnorm(key, dtype=None, adapt=as_is):
    return stateful_classifier(adapt(ConvNet(dtype)), key, labelled(key, (16, 16, 16, 8)))


class ResidualBlock(nn.Module):
    features: int
    strides: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False, dtype=self.dtype)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False, dtype=self.dtype)(y)
        y = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), self.strides, use_bias=False, dtype=self.dtype)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), dtype=self.dtype)(x)
        x = ResidualBlock(16, 1, self.dtype)(x)
        x = ResidualBlock(32, 2, self.dtype)(x)
        return nn.Dense(16, dtype=self.dtype)(jnp.mean(x, (1, 2)))


@program(has_aux=True, has_half=True, flax=True)
def linen_resnet(key, dtype=None, adapt=as_is):
    return stateful_classifier(adapt(ResNet(dtype)), key, labelled(key, (16, 8, 8, 8)))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip connection by concatenation."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        outer = nn.silu(nn.Conv(16, (3, 3), dtype=self.dtype)(x))
        inner = nn.silu(nn.Conv(32, (3, 3), 2, dtype=self.dtype)(outer))
        inner = nn.GroupNorm(8, dtype=self.dtype)(inner)
        up = nn.ConvTranspose(16, (2, 2), (2, 2), dtype=self.dtype)(inner)
        return nn.Conv(8, (3, 3), dtype=self.dtype)(jnp.concatenate([outer, up], -1))


@program(has_half=True, flax=True)
def linen_unet(key, dtype=None, adapt=as_is):
    model, inputs = adapt(UNet(dtype)), jax.random.normal(key, (8, 16, 16, 8))
    params = model.init(key, inputs)["params"]

    def loss_fn(params, batch):
        out = model.apply({"params": params}, batch["noisy"]).astype(jnp.float32)
        return jnp.mean((out - batch["clean"]) ** 2)

    return loss_fn, params, {"noisy": inputs, "clean": jnp.tanh(inputs)}
