"""BERT's pre-training step (Devlin et al., 2018, https://arxiv.org/abs/1810.04805): masked tokens and next sentence."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from .transformer import Encoder
from .workload import Batch, TransformerWorkload, cross_entropy, register


class BertForPreTraining(Encoder):
    """Tokens, segments [batch, length], lengths [batch], masked positions [batch, masked] to both heads' logits."""

    pre_norm: bool = False
    segments: int = 2

    @nn.compact
    def __call__(
        self, tokens: jax.Array, segments: jax.Array, lengths: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, embedding = self.encode(tokens, segments, lengths)
        pooled = jnp.tanh(nn.Dense(self.features, dtype=self.dtype, name="pooler")(x[:, 0]))
        masked = jnp.take_along_axis(x, positions[..., None], axis=1)
        masked = nn.gelu(nn.Dense(self.features, dtype=self.dtype, name="mlm")(masked))
        masked = nn.LayerNorm(dtype=self.dtype, name="mlm_norm")(masked)
        logits = embedding.attend(masked)
        logits = logits + self.param("mlm_bias", nn.initializers.zeros, (self.vocabulary,)).astype(logits.dtype)
        return logits, nn.Dense(2, dtype=self.dtype, name="nsp")(pooled)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bert(TransformerWorkload):
    """Predicts `masked` tokens of each sequence; the vocabulary of 30522 is padded to a multiple of 64."""

    length: int
    masked: int
    vocabulary: int = 30528
    wide_embeddings: bool = False
    model = BertForPreTraining
    arguments = ("tokens", "segments", "lengths", "positions")
    shallow_sizes: ClassVar[dict[str, Any]] = {"layers": 6, "vocabulary": 15360}

    def batch(self, key: jax.Array) -> Batch:
        keys = jax.random.split(key, 5)
        tokens = (self.batch_size, self.length)
        masked = (self.batch_size, self.masked)
        shortest = self.length // 2
        return {
            "tokens": jax.random.randint(keys[0], tokens, 0, self.vocabulary),
            "segments": jnp.broadcast_to(jnp.arange(self.length) >= shortest, tokens).astype(jnp.int32),
            "lengths": jax.random.randint(keys[1], tokens[:1], shortest, self.length + 1),
            "positions": jax.random.randint(keys[2], masked, 0, shortest),
            "masked_tokens": jax.random.randint(keys[3], masked, 0, self.vocabulary),
            "is_next": jax.random.randint(keys[4], tokens[:1], 0, 2),
        }

    def loss(self, outputs: Any, batch: Batch) -> jax.Array:
        tokens, is_next = outputs
        return cross_entropy(tokens, batch["masked_tokens"]) + cross_entropy(is_next, batch["is_next"])


_BASE: dict[str, Any] = {"features": 768, "layers": 12, "heads": 12}
_LARGE: dict[str, Any] = {"features": 1024, "layers": 24, "heads": 16}

register("bert_base_128", Bert(batch_size=256, length=128, masked=20, **_BASE))
register("bert_base_512", Bert(batch_size=64, length=512, masked=80, **_BASE))
register("bert_large_128", Bert(batch_size=128, length=128, masked=20, **_LARGE))
register("bert_large_512", Bert(batch_size=32, length=512, masked=80, **_LARGE))
