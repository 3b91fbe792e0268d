"""A language model of four LSTM layers, as in the word-level models before transformers."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax

from .workload import TextWorkload, register


class LstmLanguageModel(nn.Module):
    """Tokens [batch, length] to logits [batch, length, vocabulary]."""

    vocabulary: int
    features: int
    layers: int
    unroll: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.features, dtype=self.dtype)(tokens)
        for i in range(self.layers):
            cell = nn.OptimizedLSTMCell(self.features, dtype=self.dtype, name=f"cell_{i}")
            x = nn.RNN(cell, unroll=self.unroll, name=f"lstm_{i}")(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype, name="head")(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lstm(TextWorkload):
    """One iteration of the compiled loop runs `unroll` steps of the recurrence."""

    length: int = 64
    features: int = 1024
    layers: int = 4
    vocabulary: int = 32768
    unroll: int = 1
    model = LstmLanguageModel
    shallow_sizes: ClassVar[dict[str, Any]] = {"length": 16, "layers": 1, "vocabulary": 8192}


register("lstm_lm", Lstm(batch_size=256))
