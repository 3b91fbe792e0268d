"""WaveGlow (Prenger et al., 2018; invertible 1×1 convolutions, affine coupling) of speech."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, as_float
from benchmarks.parity.speech import waves

STEPS, GROUP, LENGTH, WIDTH, FLOWS = 250, 8, 512, 32, 3


class Coupling(nn.Module):
    """Scale and shift of one half of the channels, by the other half and the condition."""

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> tuple[jax.Array, jax.Array]:
        a, b = jnp.split(x, 2, -1)
        gated = nn.Conv(2 * WIDTH, (3,))(a) + nn.Dense(2 * WIDTH)(condition)
        hidden = jnp.tanh(gated[..., :WIDTH]) * nn.sigmoid(gated[..., WIDTH:])
        log_scale, shift = jnp.split(nn.Conv(GROUP, (3,), kernel_init=nn.initializers.zeros)(hidden), 2, -1)
        return jnp.concatenate([a, b * jnp.exp(log_scale) + shift], -1), jnp.sum(log_scale, (1, 2))


class WaveGlow(nn.Module):
    @nn.compact
    def __call__(self, wave: jax.Array, condition: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = wave.reshape(len(wave), -1, GROUP)
        total = jnp.zeros(len(wave))
        for i in range(FLOWS):
            mixing = self.param(f"mixing_{i}", nn.initializers.orthogonal(), (GROUP, GROUP))
            x, log_scale = Coupling()(x @ mixing, condition)
            total += log_scale + x.shape[1] * jnp.linalg.slogdet(mixing)[1]
        return x, total


def pieces(rng: np.random.Generator, wave: np.ndarray, count: int) -> Batch:
    """Pieces of a wave, dithered by what 16 bits can not hold, with their energy every 64 samples as condition."""
    starts = rng.integers(len(wave) - LENGTH, size=(count, 1))
    found = wave[starts + np.arange(LENGTH)] + rng.normal(0, 0.01, (count, LENGTH))
    energy = np.log(1e-3 + np.mean(found.reshape(count, -1, 64) ** 2, -1, keepdims=True))
    return {"wave": found.astype(np.float32), "condition": np.repeat(energy, 64 // GROUP, 1).astype(np.float32)}


def bits_per_sample(models: Models, batch: Batch) -> jax.Array:
    """Negative log-likelihood under a standard normal prior."""
    z, log_determinant = models(batch["wave"], batch["condition"])
    nats = jnp.sum(0.5 * (z**2 + jnp.log(2 * jnp.pi)), (1, 2)) - log_determinant
    return jnp.mean(nats) / (LENGTH * jnp.log(2.0))


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    return bits_per_sample(models, batch), {}


@functools.cache
def held_out() -> Batch:
    return pieces(np.random.default_rng(0), waves()[1], 128)


FAMILY = Family(
    name="WaveGlow",
    data="number words by espeak-ng at 8 kHz, every fifth held out",
    metric="bits per sample",
    larger_is_better=False,
    modules={MODEL: WaveGlow()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["wave"], batch["condition"])},
    batch=lambda rng: pieces(rng, waves()[0], 24),
    test=held_out,
    predict=bits_per_sample,
    score=as_float,
    optimizer=adam(3e-3, STEPS, clip=1.0),
    steps=STEPS,
)
