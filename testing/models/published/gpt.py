"""A language model of GPT-2 medium's size (Radford et al., 2019), sequences of 1024."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax

from .transformer import Encoder
from .workload import TextWorkload, TransformerWorkload, register


class LanguageModel(Encoder):
    """Tokens [batch, length] to logits [batch, length, vocabulary], by the embedding table."""

    causal: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, embedding = self.encode(tokens)
        return embedding.attend(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt(TransformerWorkload, TextWorkload):
    """The vocabulary of 50257 is padded to a multiple of 64."""

    length: int = 1024
    features: int = 1024
    layers: int = 24
    heads: int = 16
    vocabulary: int = 50304
    model = LanguageModel
    shallow_sizes: ClassVar[dict[str, Any]] = {"layers": 2, "vocabulary": 4096}


register("gpt2_medium", Gpt(batch_size=8))
register("gpt2_medium_4096", Gpt(batch_size=2, length=4096))
