"""Two models that train against each other."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import Batch, Family, Models
from benchmarks.parity.sources import digits

LATENT, COMPONENTS = 16, 16
GENERATOR, DISCRIMINATOR = "generator", "discriminator"


class Generator(nn.Module):
    @nn.compact
    def __call__(self, z: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(4 * 4 * 32)(z)).reshape(-1, 4, 4, 32)
        x = nn.ConvTranspose(16, (4, 4), (2, 2))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Conv(1, (3, 3))(x)


class Discriminator(nn.Module):
    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.leaky_relu(nn.Conv(16, (3, 3))(image), 0.2)
        x = nn.leaky_relu(nn.Conv(32, (4, 4), 2)(x), 0.2)
        return nn.Dense(1)(x.reshape(len(x), -1))[:, 0]


def discriminator_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    fake, _ = models.training(batch["latent"], name=GENERATOR)
    logits = models[DISCRIMINATOR](jnp.concatenate([batch["image"], fake]))
    real = jnp.arange(len(logits)) < len(fake)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.where(real, 0.9, 0.0))), {}


def generator_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    fake, updated = models.training(batch["latent"], name=GENERATOR)
    return jnp.mean(jax.nn.softplus(-models[DISCRIMINATOR](fake))), updated


def batch(rng: np.random.Generator) -> Batch:
    images = digits(1200)[0]["image"]
    return {
        "image": images[rng.integers(len(images), size=48)],
        "latent": rng.normal(size=(48, LATENT)).astype(np.float32),
    }


def held_out() -> Batch:
    latent = np.random.default_rng(10**6).normal(size=(1024, LATENT)).astype(np.float32)
    return {"latent": latent, "image": digits(1200)[1]["image"]}


def frechet_distance(generated: np.ndarray, test: Batch) -> float:
    """Fréchet distance of Gaussians fitted to the first principal components of the pixels."""
    import scipy.linalg

    train = digits(1200)[0]["image"].reshape(-1, 64)
    components = np.linalg.svd(train - train.mean(0), full_matrices=False)[2][:COMPONENTS].T
    a, b = (np.asarray(x, np.float64).reshape(-1, 64) @ components for x in (generated, test["image"]))
    if not np.isfinite(a).all():
        return float("nan")
    first, second = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = scipy.linalg.sqrtm(first @ second).real
    return float(np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(first + second - 2 * root))


def gan() -> Family:
    """DCGAN (Radford et al., 2015; non-saturating loss, two optimizers) of handwritten digits."""
    return Family(
        name="DCGAN",
        data="digits (scikit-learn)",
        metric="Fréchet distance",
        larger_is_better=False,
        modules={GENERATOR: Generator(), DISCRIMINATOR: Discriminator()},
        losses={DISCRIMINATOR: discriminator_loss, GENERATOR: generator_loss},
        example=lambda batch: {GENERATOR: (batch["latent"], True), DISCRIMINATOR: (batch["image"],)},
        batch=batch,
        test=held_out,
        predict=lambda models, test: models[GENERATOR](test["latent"], train=False),
        score=frechet_distance,
        optimizer=lambda updates: optax.flatten(optax.adam(1e-3, b1=0.5)),
        steps=300,
    )
