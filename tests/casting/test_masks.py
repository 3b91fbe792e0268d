"""However a mask is written, attention stores the same bytes for the backward pass."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax import autocast
from testing import measures

BATCH, LENGTH, HEADS, WIDTH = 2, 32, 2, 8
IDS = jnp.ones((BATCH, LENGTH), jnp.int32)
CAUSAL = jnp.asarray(np.tri(LENGTH, dtype=bool)[None, None])
WEIGHTS = 0.1 * jax.random.normal(jax.random.key(0), (2, 4, WIDTH, WIDTH))
X = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, HEADS, WIDTH))


def distances():
    return jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)


MASKS = {
    "tril": lambda ids: jnp.tril(jnp.ones((LENGTH, LENGTH), bool)),
    "triu": lambda ids: ~jnp.triu(jnp.ones((LENGTH, LENGTH), bool), 1),
    "tril_of_floats": lambda ids: jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH))) == 1,
    "tri": lambda ids: jnp.tri(LENGTH, dtype=bool),
    "comparison": lambda ids: jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH),
    "window": lambda ids: (distances() >= 0) & (distances() < 8),
    "rows": lambda ids: jax.vmap(lambda row: jnp.arange(LENGTH) <= row)(jnp.arange(LENGTH)),
    "linen": nn.make_causal_mask,
    "nnx": lambda ids: nnx.make_causal_mask(ids, dtype=bool),
    "lengths": lambda ids: (jnp.arange(LENGTH) < ids.sum(-1, keepdims=True))[:, None, None],
    "combined": lambda ids: nn.combine_masks(nn.make_causal_mask(ids), nn.make_attention_mask(ids > 0, ids > 0)),
    "segments": lambda ids: (ids[:, None, :, None] == ids[:, None, None]) & jnp.tri(LENGTH, dtype=bool),
}


def written_out(applied):
    """Attention with a function that applies the mask to the scores."""

    def attention(q, k, v, mask):
        scores = jnp.einsum("bshe,bthe->bhst", q, k) / WIDTH**0.5
        return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(applied(scores, mask)), v)

    return attention


def with_bias(q, k, v, mask):  # as in Hugging Face's models
    zeros, low = jnp.zeros(mask.shape), jnp.full(mask.shape, -1e9)
    return nn.dot_product_attention(q, k, v, bias=jax.lax.select(mask, zeros, low))


ATTENTIONS = {
    "where": written_out(lambda scores, mask: jnp.where(mask, scores, -1e30)),
    "select": written_out(lambda s, mask: jax.lax.select(jnp.broadcast_to(mask, s.shape), s, jnp.full_like(s, -1e9))),
    "sum": written_out(lambda scores, mask: scores + jnp.where(mask, 0.0, -1e9)),
    "product": written_out(lambda scores, mask: scores + (1.0 - mask.astype(jnp.float32)) * -1e9),
    "infinity": written_out(lambda scores, mask: scores + jnp.triu(jnp.full((LENGTH, LENGTH), -jnp.inf), 1)),
    "gemma": written_out(lambda scores, mask: jnp.where(mask, jnp.tanh(scores / 50.0) * 50.0, -2.3819763e38)),
    "bias": with_bias,
    "linen": lambda q, k, v, mask: nn.dot_product_attention(q, k, v, mask=mask),
    "jax": lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, mask=mask),
    "jax_causal": lambda q, k, v, mask: jax.nn.dot_product_attention(q, k, v, is_causal=True),
}


def layer(weights, x, ids, mask, make_mask, attention):
    mask = mask if make_mask is None else make_mask(ids).astype(bool)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    normalised = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
    q, k, v = (normalised @ weight for weight in weights[:3])
    return x + attention(q, k, v, mask) @ weights[3]


def scanned(one, weights, x, ids, mask):
    return jax.lax.scan(lambda x, weights: (one(weights, x, ids, mask), None), x, weights)[0]


def in_a_row(one, weights, x, ids, mask):
    return functools.reduce(lambda x, weights: one(weights, x, ids, mask), weights, x)


def mapped(one, weights, x, ids, mask):
    def of_batch(weights, x, ids, mask):
        return jax.vmap(lambda x, ids: one(weights, x[None], ids[None], mask)[0])(x, ids)

    return in_a_row(of_batch, weights, x, ids, mask)


TRANSFORMATIONS = {
    "none": in_a_row,
    "jit": lambda one, *args: in_a_row(jax.jit(one), *args),
    "jit_of_all": lambda one, *args: jax.jit(functools.partial(in_a_row, one))(*args),
    "remat": lambda one, *args: in_a_row(jax.checkpoint(one), *args),
    "scan": scanned,
    "scan_of_remat": lambda one, *args: scanned(jax.checkpoint(one), *args),
    "vmap": mapped,
}


def loss_of(make_mask=None, attention="where", transformation="none"):
    one = functools.partial(layer, make_mask=make_mask, attention=ATTENTIONS[attention])
    return autocast(lambda *args: jnp.sum(TRANSFORMATIONS[transformation](one, *args) ** 2), "mixed_bfloat16")


@functools.cache
def stored(*options):
    return measures.residual_bytes(loss_of(*options), WEIGHTS, X, IDS, CAUSAL)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_that_each_layer_makes_stores_as_much_as_an_argument(mask):
    assert stored(MASKS[mask]) == stored()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_all_ways_to_apply_a_mask_store_as_much(attention):
    assert stored(MASKS["tril"], attention) == stored(None, attention) == stored()


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_under_transformations_a_mask_stores_as_much_as_an_argument(transformation):
    assert stored(MASKS["combined"], "where", transformation) == stored(None, "where", transformation)


def test_a_mask_for_all_layers_is_stored_once():
    def loss(weights, x, ids, mask, make_mask):
        mask = mask if make_mask is None else make_mask(ids)
        one = functools.partial(layer, make_mask=None, attention=ATTENTIONS["where"])
        return jnp.sum(in_a_row(one, weights, x, ids, mask) ** 2)

    made = autocast(functools.partial(loss, make_mask=lambda ids: nn.make_causal_mask(ids[:1], dtype=bool)))
    assert measures.residual_bytes(made, WEIGHTS, X, IDS, CAUSAL) == stored() + CAUSAL.nbytes
