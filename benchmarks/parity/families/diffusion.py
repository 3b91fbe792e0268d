"""Denoising diffusion (Ho et al., 2020; a U-Net conditioned on the noise level) of handwritten digits."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, as_float
from benchmarks.parity.sources import digits

STEPS, LEVELS = 200, 100


class Block(nn.Module):
    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (3, 3), self.strides)(x)
        return nn.silu(nn.GroupNorm(4)(x) + nn.Dense(self.features)(level)[:, None, None])


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, step: jax.Array) -> jax.Array:
        angles = step[:, None] / LEVELS * jnp.exp(jnp.linspace(0.0, 5.0, 16))
        level = nn.silu(nn.Dense(32)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)))
        full = Block(16)(x, level)
        half = Block(32)(Block(32, 2)(full, level), level)
        up = nn.ConvTranspose(16, (2, 2), (2, 2))(half)
        return nn.Conv(1, (3, 3))(Block(16)(jnp.concatenate([up, full], -1), level))


def noisy(rng: np.random.Generator, images: np.ndarray) -> Batch:
    """Images with noise at random steps of a cosine schedule; the noise is what the model should find."""
    step = rng.integers(1, LEVELS, len(images))
    kept = np.cos(0.5 * np.pi * step / LEVELS)[:, None, None, None]
    noise = rng.normal(size=images.shape)
    mixed = kept * images + np.sqrt(1 - kept**2) * noise
    return {"image": mixed.astype(np.float32), "step": step.astype(np.float32), "noise": noise.astype(np.float32)}


def batch(rng: np.random.Generator) -> Batch:
    images = digits(1200)[0]["image"]
    return noisy(rng, images[rng.integers(len(images), size=48)])


@functools.cache
def held_out() -> Batch:
    return noisy(np.random.default_rng(0), digits(1200)[1]["image"])


def error(models: Models, batch: Batch) -> jax.Array:
    return jnp.mean((models(batch["image"], batch["step"]) - batch["noise"]) ** 2)


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    return error(models, batch), {}


FAMILY = Family(
    name="Diffusion U-Net",
    data="digits (scikit-learn)",
    metric="error of the noise",
    larger_is_better=False,
    modules={MODEL: UNet()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["image"], batch["step"])},
    batch=batch,
    test=held_out,
    predict=error,
    score=as_float,
    optimizer=adam(3e-3, STEPS, clip=1.0),
    steps=STEPS,
)
