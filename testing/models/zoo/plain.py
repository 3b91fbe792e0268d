"""Models in plain JAX: attention, embeddings, mixtures of experts, pooling, a gradient penalty."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .linen import cross_entropy
from .program import dense_params, labelled, program


@program(has_half=True)
def dot_product_attention(key, dtype=None):
    """`jax.nn.dot_product_attention`, causal."""
    qkv, out = dense_params(key, 32, 96, 32)
    out = {"w": out["w"][:32], "b": out["b"]}

    def loss_fn(params, x):
        half = params if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        y = x if dtype is None else x.astype(dtype)
        heads = (y @ half["qkv"]["w"] + half["qkv"]["b"]).reshape(*x.shape[:2], 3, 4, 8)
        query, keys, values = (heads[:, :, i] for i in range(3))
        y = jax.nn.dot_product_attention(query, keys, values, is_causal=True)
        y = y.reshape(x.shape) @ half["out"]["w"] + half["out"]["b"]
        return jnp.mean((y.astype(jnp.float32) - x) ** 2)

    return loss_fn, {"qkv": qkv, "out": out}, jax.random.normal(key, (8, 16, 32))


@program()
def embedding_tied(key):
    """A bag of words with tied output: gathers, whose gradients are scatter-adds."""
    params = {"table": jax.random.normal(key, (64, 32)), "layer": dense_params(key, 32, 32)[0]}

    def loss_fn(params, batch):
        bags, targets = batch
        x = params["table"][bags].mean(1) @ params["layer"]["w"] + params["layer"]["b"]
        return cross_entropy(jnp.tanh(x) @ params["table"].T, targets)

    bags = jax.random.randint(key, (256, 4), 0, 64)
    return loss_fn, params, (bags, bags[:, 0])


@program()
def moe_einsum(key):
    """A mixture of experts by einsum: a softmax over experts in the middle of the network."""
    params = {
        "router": jax.random.normal(key, (32, 4)) / 32**0.5,
        "up": jax.random.normal(key, (4, 32, 64)) / 32**0.5,
        "down": jax.random.normal(key, (4, 64, 16)) / 64**0.5,
    }

    def loss_fn(params, batch):
        x, labels = batch
        gates = jax.nn.softmax(x @ params["router"])
        hidden = jax.nn.silu(jnp.einsum("bd,edh->beh", x, params["up"]))
        logits = jnp.einsum("be,beh,eho->bo", gates, hidden, params["down"])
        load = jnp.mean(gates, 0)
        return cross_entropy(logits, labels) + 0.1 * jnp.sum(load * jnp.log(load))

    return loss_fn, params, labelled(key, (256, 32))


# JAX's ragged_dot has no batching rule for more than its leading dimension.
@program(refuses={"vmap"})
def moe_ragged(key):
    """A mixture of experts by `ragged_dot`: tokens sorted by expert, group sizes counted."""
    params = {
        "router": jax.random.normal(key, (32, 4)) / 32**0.5,
        "experts": jax.random.normal(key, (4, 32, 32)) / 32**0.5,
        "head": dense_params(key, 32, 16)[0],
    }

    def loss_fn(params, batch):
        (x, noise), labels = batch
        scores = jax.nn.softmax(x @ params["router"])
        # The data choose the expert, so that rounding in the router never changes the choice.
        expert = jnp.argmax(noise, -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=4)
        y = lax.ragged_dot(x[order], params["experts"], sizes)
        y = jnp.zeros_like(y).at[order].set(jax.nn.silu(y))
        y = y * jnp.take_along_axis(scores, expert[:, None], -1)
        return cross_entropy(y @ params["head"]["w"] + params["head"]["b"], labels)

    inputs, labels = labelled(key, (256, 32))
    return loss_fn, params, ((inputs, jax.random.normal(key, (256, 4))), labels)


@program(has_half=True)
def conv_pooling(key, dtype=None):
    """Dilated, grouped and strided convolutions of signals, with pooling of both kinds."""
    keys = jax.random.split(key, 3)
    params = {
        "dilated": jax.random.normal(keys[0], (3, 8, 16)) / 24**0.5,
        "grouped": jax.random.normal(keys[1], (3, 4, 32)) / 12**0.5,
        "strided": jax.random.normal(keys[2], (4, 32, 16)) / 128**0.5,
    }

    def convolve(x, kernel, **options):
        return lax.conv_general_dilated(x, kernel, padding="SAME", dimension_numbers=("NWC", "WIO", "NWC"), **options)

    def pool(x, start, reducer):
        return lax.reduce_window(x, start, reducer, (1, 2, 1), (1, 2, 1), "VALID")

    def loss_fn(params, batch):
        x, labels = batch
        if dtype is not None:
            x, params = jax.tree.map(lambda leaf: leaf.astype(dtype), (x, params))
        x = jnp.tanh(convolve(x, params["dilated"], window_strides=(1,), rhs_dilation=(2,)))
        x = pool(x, -jnp.inf, lax.max)
        x = jnp.tanh(convolve(x, params["grouped"], window_strides=(1,), feature_group_count=4))
        x = pool(x, 0.0, lax.add) / 2
        x = convolve(x, params["strided"], window_strides=(4,))
        return cross_entropy(x.mean(1), labels)

    return loss_fn, params, labelled(key, (32, 32, 8))


@program()
def gradient_penalty(key):
    """A critic with a penalty on the norm of its input gradient: differentiated twice."""
    params = dense_params(key, 32, 64, 8)

    def critic(params, x):
        hidden = jnp.tanh(x @ params[0]["w"] + params[0]["b"])
        return jnp.mean(hidden @ params[1]["w"] + params[1]["b"], -1)

    def loss_fn(params, batch):
        real, fake = batch
        slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, real)
        penalty = jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1.0) ** 2)
        return jnp.mean(critic(params, fake)) - jnp.mean(critic(params, real)) + penalty

    return loss_fn, params, tuple(jax.random.normal(k, (256, 32)) for k in jax.random.split(key))


@program(has_aux=True)
def contrastive(key):
    """Two views, cosine similarities and a logsumexp: norms in the middle of the network."""
    params = dense_params(key, 32, 64, 32)

    def embed(params, x):
        x = jax.nn.gelu(x @ params[0]["w"] + params[0]["b"]) @ params[1]["w"]
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)

    def loss_fn(params, batch):
        similarity = embed(params, batch[0]) @ embed(params, batch[1]).T / 0.5
        losses = jax.nn.logsumexp(similarity, -1) - jnp.diagonal(similarity)
        return jnp.mean(losses), {"accuracy": jnp.mean(jnp.argmax(similarity, -1) == jnp.arange(len(losses)))}

    view = jax.random.normal(key, (64, 32))
    return loss_fn, params, (view, view + 0.3 * jax.random.normal(jax.random.key(1), view.shape))
