"""Deep Speech 2 (Amodei et al., 2015, https://arxiv.org/abs/1512.02595): convolutions, bidirectional GRUs, CTC."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .workload import Batch, Workload, register


class DeepSpeech2(nn.Module):
    """Spectrograms [batch, frames, frequencies] to logits [batch, frames / 2, characters]."""

    characters: int
    features: int
    layers: int
    channels: int
    unroll: int = 1
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[..., None]
        # Over time and frequency; only the first one shortens time.
        for kernel, stride in (((11, 41), (2, 2)), ((11, 21), (1, 2))):
            padding = [(size // 2, size // 2) for size in kernel]
            x = nn.Conv(self.channels, kernel, stride, padding=padding, use_bias=False, dtype=self.dtype)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x)
            x = jnp.clip(x, 0, 20)
        x = x.reshape(*x.shape[:2], -1)
        for _ in range(self.layers):
            forward, backward = (
                nn.RNN(nn.GRUCell(self.features, dtype=self.dtype), unroll=self.unroll) for _ in range(2)
            )
            y: Any = nn.Bidirectional(forward, backward, merge_fn=jnp.add)(x)
            x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(y)
        return nn.Dense(self.characters, dtype=self.dtype)(x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speech(Workload):
    """Ten seconds of speech at a frame every 10 ms, and transcripts of up to `label_length` characters."""

    frames: int = 1000
    frequencies: int = 161
    characters: int = 29
    label_length: int = 160
    features: int = 800
    layers: int = 5
    channels: int = 32
    unroll: int = 1
    model = DeepSpeech2
    arguments = ("spectrograms",)
    # The whole batch: for 16 examples XLA needs more than 23 GB to compile a weight gradient for a TPU v6e.
    shallow_sizes: ClassVar[dict[str, Any]] = {"frames": 200, "layers": 1}

    def batch(self, key: jax.Array) -> Batch:
        keys = jax.random.split(key, 3)
        return {
            "spectrograms": jax.random.normal(keys[0], (self.batch_size, self.frames, self.frequencies)),
            # 0 is CTC's blank.
            "labels": jax.random.randint(keys[1], (self.batch_size, self.label_length), 1, self.characters),
            "label_lengths": jax.random.randint(
                keys[2], (self.batch_size,), self.label_length // 2, self.label_length + 1
            ),
        }

    def loss(self, outputs: Any, batch: Batch) -> jax.Array:
        logits = outputs.astype(jnp.float32)
        padding = (jnp.arange(self.label_length) >= batch["label_lengths"][:, None]).astype(jnp.float32)
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), batch["labels"], padding).mean()


register("deep_speech_2", Speech(batch_size=64))
