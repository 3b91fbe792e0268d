"""Flax Linen models of sequences: transformers and recurrent networks."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .linen import classifier, cross_entropy
from .program import as_is, labelled, program

VOCABULARY = 64
# The proportions of BERT-base at sequence 128: attention weights per token (heads x length) are twice
# the width, the feed-forward layer is four times the width.
WIDTH, HEADS, LENGTH = 64, 4, 32


class Block(nn.Module):
    """A pre-norm transformer block; called as the body of a scan it returns a carry and no output."""

    dtype: Any = None
    in_scan: bool = False

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        # The hand-written form also keeps exp out of half, with a Flax option.
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, dtype=self.dtype, force_fp32_for_softmax=True)(
            y, mask=mask
        )
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(y))
        x = x + nn.Dense(WIDTH, dtype=self.dtype)(y)
        return (x, None) if self.in_scan else x


class Transformer(nn.Module):
    """A causal language model, its layers unrolled or under `nn.scan` and `nn.remat`."""

    dtype: Any = None
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], WIDTH)).astype(x.dtype)
        mask = nn.make_causal_mask(tokens)
        if self.scanned:
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=nn.broadcast,
                length=2,
            )
            x, _ = layers(self.dtype, in_scan=True)(x, mask)
        else:
            for _ in range(2):
                x = Block(self.dtype)(x, mask)
        return nn.Dense(VOCABULARY, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def language_model(model: nn.Module, key: jax.Array) -> tuple[Any, Any, Any]:
    tokens = jax.random.randint(key, (4, LENGTH + 1), 0, VOCABULARY)
    params = model.init(key, tokens[:, :-1])["params"]

    def loss_fn(params, tokens):
        return cross_entropy(model.apply({"params": params}, tokens[:, :-1]), tokens[:, 1:])

    return loss_fn, params, tokens


@program(has_half=True, flax=True)
def linen_transformer(key, dtype=None, adapt=as_is):
    return language_model(adapt(Transformer(dtype)), key)


@program(has_half=True, flax=True)
def linen_transformer_scan_remat(key, dtype=None, adapt=as_is):
    return language_model(adapt(Transformer(dtype, scanned=True)), key)


class LSTM(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(32, dtype=self.dtype))(x)
        return nn.Dense(16, dtype=self.dtype)(x[:, -1])


@program(has_half=True, flax=True)
def linen_lstm(key, dtype=None, adapt=as_is):
    return classifier(adapt(LSTM(dtype)), key, labelled(key, (64, 8, 32)))


class SpeechModel(nn.Module):
    """A small DeepSpeech: a convolution over time, a GRU, an output layer of characters."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (5,), dtype=self.dtype)(x))
        x = nn.RNN(nn.GRUCell(32, dtype=self.dtype))(x)
        return nn.Dense(16, dtype=self.dtype)(x)


@program(has_half=True, flax=True)
def linen_gru_ctc(key, dtype=None, adapt=as_is):
    model, inputs = adapt(SpeechModel(dtype)), jax.random.normal(key, (8, 16, 16))
    params = model.init(key, inputs)["params"]
    batch = {
        "inputs": inputs,
        "input_paddings": jnp.zeros((8, 16)).at[:, 14:].set(1.0),
        "labels": jax.random.randint(key, (8, 4), 1, 16),
        "label_paddings": jnp.zeros((8, 4)).at[::2, 3].set(1.0),
    }

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["inputs"]).astype(jnp.float32)
        paddings = batch["input_paddings"], batch["label_paddings"]
        return optax.ctc_loss(logits, paddings[0], batch["labels"], paddings[1]).mean()

    return loss_fn, params, batch
