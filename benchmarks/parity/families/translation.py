"""Translation of short sequences of characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.corpora import PAD, START, SYMBOLS, dates, numerals, sequence_accuracy
from benchmarks.parity.family import MODEL, Batch, Family, Models, adam, stateless

WIDTH = 64
Pairs = Callable[[np.random.Generator, int], Batch]


class Block(nn.Module):
    """Self-attention, attention to the source where there is one, feed-forward; normalised first."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, source: jax.Array | None, source_mask: jax.Array) -> jax.Array:
        x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
        if source is not None:
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), source, mask=source_mask)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, source: jax.Array, shifted: jax.Array) -> jax.Array:
        embed = nn.Embed(SYMBOLS, WIDTH)
        place = self.param("positions", nn.initializers.normal(0.1), (source.shape[1], WIDTH))
        visible = nn.make_attention_mask(jnp.ones_like(source), source != PAD)
        memory = nn.LayerNorm()(Block()(embed(source) + place, visible, None, visible))
        across = nn.make_attention_mask(jnp.ones_like(shifted), source != PAD)
        x = embed(shifted) + place[: shifted.shape[1]]
        x = Block()(x, nn.make_causal_mask(shifted), memory, across)
        return nn.Dense(SYMBOLS)(nn.LayerNorm()(x))


def loss(models: Models, batch: Batch) -> jax.Array:
    logits = models(batch["source"], batch["shifted"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"])
    real = batch["target"] != PAD
    return jnp.sum(jnp.where(real, each, 0.0)) / jnp.sum(real)


def translate(models: Models, test: Batch) -> jax.Array:
    """Greedy decoding."""
    count, length = test["target"].shape

    def add(i: jax.Array, text: jax.Array) -> jax.Array:
        best = jnp.argmax(models(test["source"], text[:, :-1]), -1)
        return text.at[:, i + 1].set(best[:, i].astype(text.dtype))

    start = jnp.zeros((count, length + 1), jnp.int32).at[:, 0].set(START)
    return jax.lax.fori_loop(0, length, add, start)[:, 1:]


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


def translator(name: str, pairs: Pairs, model: nn.Module, peak: float, steps: int, data: str, metric: str) -> Family:
    """The family of a model that writes one sequence for another."""
    return Family(
        name=name,
        data=data,
        metric=metric,
        modules={MODEL: model},
        losses={MODEL: stateless(loss)},
        example=lambda batch: {MODEL: (batch["source"], batch["shifted"])},
        batch=lambda rng: pairs(rng, 64),
        test=lambda: pairs(np.random.default_rng(10**6), 512),  # with a seed that no training uses
        predict=translate,
        score=sequence_accuracy,
        optimizer=adam(peak, clip=1.0),
        steps=steps,
    )


def transformer() -> Family:
    """Transformer (Vaswani et al., 2017): dates as people write them to ISO 8601."""
    data = "generated dates in six formats (standard library's calendar)"
    return translator("Transformer", dates, Transformer(), 3e-3, 300, data=data, metric="whole dates correct, %")


def gnmt() -> Family:
    """GNMT (Wu et al., 2016; bidirectional encoder, attention, residual LSTM decoder): numbers in words to digits."""
    data = "generated numbers below 10,000"
    return translator("GNMT", numerals, GNMT(), 1e-2, 120, data=data, metric="whole numbers correct, %")
