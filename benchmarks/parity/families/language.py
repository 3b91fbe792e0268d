"""Language models of characters."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.parity.family import MODEL, Batch, Family, Models, accuracy, adam, as_float, cross_entropy, stateless
from benchmarks.parity.sources import CHARACTERS, manual, standard_library, windows

PACKAGES = ("asyncio", "email", "unittest", "xml/dom")
WIDTH, PIECE, MASK = 64, 64, 0
PRETRAINING = 0.5  # of the batches


class BERT(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(128, WIDTH)(text) + self.param("positions", nn.initializers.normal(0.02), (PIECE, WIDTH))
        x = nn.LayerNorm()(x)
        for _ in range(self.layers):
            x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(4)(x))
            x = nn.LayerNorm()(x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x))))
        return nn.Dense(128)(x), nn.Dense(len(PACKAGES))(jnp.tanh(nn.Dense(WIDTH)(jnp.mean(x, 1))))


@functools.cache
def texts(train: bool) -> tuple[np.ndarray, ...]:
    """Source of each package as ASCII; every fourth file is held out."""
    found = []
    for package in PACKAGES:
        files = list(standard_library((package,)).values())
        text = "".join(text for i, text in enumerate(files) if (i % 4 != 3) == train)
        found.append(np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32))
    return tuple(found)


def pieces(rng: np.random.Generator, count: int, train: bool) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.integers(len(PACKAGES), size=count).astype(np.int32)
    sources = [texts(train)[label] for label in labels]
    starts = [rng.integers(len(source) - PIECE) for source in sources]
    return np.stack([s[i : i + PIECE] for s, i in zip(sources, starts, strict=True)]), labels


def bert_batch(rng: np.random.Generator) -> Batch:
    """A fine-tuning batch masks nothing; the mix of both kinds makes one compiled step."""
    text, labels = pieces(rng, 32, train=True)
    pretraining = rng.random() < PRETRAINING
    masked = rng.random(text.shape) < 0.15 * pretraining
    return {
        "text": np.where(masked, MASK, text),
        "target": text,
        "masked": masked,
        "label": labels,
        "pretraining": np.float32(pretraining),
    }


def bert_loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    characters, package = models(batch["text"])
    each = optax.softmax_cross_entropy_with_integer_labels(characters, batch["target"])
    masked = jnp.sum(jnp.where(batch["masked"], each, 0.0)) / jnp.maximum(jnp.sum(batch["masked"]), 1)
    tuning = cross_entropy(package, batch["label"])
    return batch["pretraining"] * masked + (1 - batch["pretraining"]) * tuning, {}


def held_out_pieces() -> Batch:
    text, label = pieces(np.random.default_rng(0), 1024, train=False)
    return {"text": text, "label": label}


def bert() -> Family:
    """BERT (Devlin et al., 2018): masked characters of Python source, then which package a piece is from."""
    return Family(
        name="BERT",
        data="Python's standard library, 4 packages, every fourth file held out",
        metric="accuracy, %",
        modules={MODEL: BERT()},
        losses={MODEL: bert_loss},
        example=lambda batch: {MODEL: (batch["text"],)},
        batch=bert_batch,
        test=held_out_pieces,
        predict=lambda models, test: jnp.argmax(models(test["text"])[1], -1),
        score=accuracy,
        optimizer=adam(2e-3, clip=1.0),
        steps=240,
    )


class Cell(nn.Module):
    """The hidden state multiplies a projection of the input before the gates read it."""

    @nn.compact
    def __call__(
        self, carry: tuple[jax.Array, jax.Array], x: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        c, h = carry
        m = nn.Dense(2 * WIDTH, use_bias=False, name="mx")(x) * nn.Dense(2 * WIDTH, use_bias=False, name="mh")(h)
        gates = nn.Dense(4 * 2 * WIDTH, name="x")(x) + nn.Dense(4 * 2 * WIDTH, use_bias=False, name="m")(m)
        i, f, o, u = jnp.split(gates, 4, -1)
        c = nn.sigmoid(f + 1.0) * c + nn.sigmoid(i) * jnp.tanh(u)
        h = nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h


class MLSTM(nn.Module):
    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        x = nn.Embed(CHARACTERS, 64)(text)
        scanned = nn.scan(Cell, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        zeros = jnp.zeros((x.shape[0], 2 * WIDTH), x.dtype)
        return nn.Dense(CHARACTERS)(scanned()((zeros, zeros), x)[1])


def nats(models: Models, text: jax.Array) -> jax.Array:
    return cross_entropy(models(text[:, :-1]), text[:, 1:])


def of_manual(name: str, model: nn.Module, count: int, length: int, peak: float, steps: int) -> Family:
    """The family of a model of characters."""
    return Family(
        name=name,
        data="the Python manual (pydoc_data)",
        metric="bits per character",
        larger_is_better=False,
        modules={MODEL: model},
        losses={MODEL: stateless(nats)},
        example=lambda batch: {MODEL: (batch[:, :-1],)},
        batch=lambda rng: windows(rng, manual()[0], count, length + 1),
        test=lambda: windows(np.random.default_rng(0), manual()[1], 128, 96),
        predict=lambda models, test: nats(models, test) / jnp.log(2.0),
        score=as_float,
        optimizer=adam(peak, clip=1.0),
        steps=steps,
    )


def mlstm() -> Family:
    """Multiplicative LSTM character model (Krause et al., 2016) on the Python manual."""
    return of_manual("mLSTM", MLSTM(), 32, 48, 1e-2, 200)


GPT_LENGTH = 95


class GPT(nn.Module):
    layers: int = 2

    @nn.compact
    def __call__(self, text: jax.Array) -> jax.Array:
        embed = nn.Embed(CHARACTERS, WIDTH)
        x = embed(text) + self.param("positions", nn.initializers.normal(0.02), (GPT_LENGTH, WIDTH))
        mask = nn.make_causal_mask(text)
        for _ in range(self.layers):
            x += nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def gpt() -> Family:
    """GPT (Radford et al., 2019; causal, normalised first) over characters of the Python manual."""
    return of_manual("GPT", GPT(), 16, GPT_LENGTH, 3e-3, 250)
