"""Multiplicative LSTM character model (Krause et al., 2016) on the Python manual."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, as_float, cross_entropy
from benchmarks.parity.sources import CHARACTERS, manual, windows

STEPS, LENGTH, WIDTH = 200, 48, 128


class Cell(nn.Module):
    """The hidden state multiplies a projection of the input before the gates read it."""

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, jax.Array], x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        c, h = carry
        m = nn.Dense(WIDTH, use_bias=False, name="mx")(x) * nn.Dense(WIDTH, use_bias=False, name="mh")(h)
        gates = nn.Dense(4 * WIDTH, name="x")(x) + nn.Dense(4 * WIDTH, use_bias=False, name="m")(m)
        i, f, o, u = jnp.split(gates, 4, -1)
        c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(u)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h


class CharacterModel(nn.Module):
    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(CHARACTERS, 64)(text)
        scanned = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        zeros = jnp.zeros((x.shape[0], WIDTH), x.dtype)
        return nn.Dense(CHARACTERS)(scanned()((zeros, zeros), x)[1])


def nats(models: Models, text: jax.Array) -> jax.Array:
    return cross_entropy(models(text[:, :-1]), text[:, 1:])


@functools.cache
def held_out() -> np.ndarray:
    return windows(np.random.default_rng(0), manual()[1], 128, 2 * LENGTH)


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    return nats(models, batch), {}


FAMILY = Family(
    name="mLSTM",
    data="the Python manual (pydoc_data)",
    metric="bits per character",
    larger_is_better=False,
    modules={MODEL: CharacterModel()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch[:, :-1],)},
    batch=lambda rng: windows(rng, manual()[0], 32, LENGTH + 1),
    test=held_out,
    predict=lambda models, test: nats(models, test) / jnp.log(2.0),
    score=as_float,
    optimizer=adam(1e-2, STEPS, clip=1.0),
    steps=STEPS,
)
