"""GNMT (Wu et al., 2016; bidirectional encoder, attention, residual LSTM decoder): numbers in words to digits."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.parity.corpora import PAD, SYMBOLS, held_out, numerals, sequence_accuracy
from benchmarks.parity.families.transformer import loss, translate
from benchmarks.parity.family import MODEL, Family, adam

STEPS, WIDTH = 120, 64


class GNMT(nn.Module):
    @nn.compact
    def __call__(self, source: jax.Array, shifted: jax.Array) -> jax.Array:
        embed = nn.Embed(SYMBOLS, WIDTH)
        lengths = jnp.sum(source != PAD, 1)
        first: Any = nn.RNN(nn.OptimizedLSTMCell(WIDTH))
        both = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(WIDTH // 2)), nn.RNN(nn.OptimizedLSTMCell(WIDTH // 2)))
        memory = both(embed(source), seq_lengths=lengths)
        x = first(embed(shifted))
        mask = nn.make_attention_mask(jnp.ones_like(shifted), source != PAD)
        context = nn.MultiHeadDotProductAttention(1)(x, memory, mask=mask)
        second: Any = nn.RNN(nn.OptimizedLSTMCell(WIDTH))
        x += second(jnp.concatenate([x, context], -1))
        return nn.Dense(SYMBOLS)(jnp.concatenate([x, context], -1))


FAMILY = Family(
    name="GNMT",
    data="generated numbers below 10,000",
    metric="whole numbers correct, %",
    modules={MODEL: GNMT()},
    losses={MODEL: loss},
    example=lambda batch: {MODEL: (batch["source"], batch["shifted"])},
    batch=lambda rng: numerals(rng, 64),
    test=lambda: held_out("numerals"),
    predict=translate,
    score=sequence_accuracy,
    optimizer=adam(1e-2, STEPS, clip=1.0),
    steps=STEPS,
)
