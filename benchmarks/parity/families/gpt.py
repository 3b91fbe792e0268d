"""GPT (Radford et al., 2019; causal, normalised first) over characters of the Python manual."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.parity.families.mlstm import held_out, loss, nats
from benchmarks.parity.family import MODEL, Family, adam, as_float
from benchmarks.parity.sources import CHARACTERS, manual, windows

STEPS, LENGTH, WIDTH = 250, 95, 64


class GPT(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        embed = nn.Embed(CHARACTERS, WIDTH)
        x = embed(text) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        mask = nn.make_causal_mask(text)
        for _ in range(self.layers):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


FAMILY = Family(
    name="GPT",
    data="the Python manual (pydoc_data)",
    metric="bits per character",
    larger_is_better=False,
    modules={MODEL: GPT()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch[:, :-1],)},
    batch=lambda rng: windows(rng, manual()[0], 16, LENGTH + 1),
    test=held_out,
    predict=lambda models, test: nats(models, test) / jnp.log(2.0),
    score=as_float,
    optimizer=adam(3e-3, STEPS, clip=1.0),
    steps=STEPS,
)
