"""A typical training script, without mpjax: a language model in hand-written float16, with its mistakes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, VOCABULARY, PADDING = 256, 1003, 0


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-8)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = Norm()(x)
        q, k, v = jnp.split(nn.Dense(3 * WIDTH, dtype=jnp.float16, name="qkv")(h), 3, axis=-1)
        scores = q @ k.swapaxes(-1, -2) / 16 + jnp.where(mask, 0, -1e9).astype(jnp.float16)
        x = x + nn.Dense(WIDTH, dtype=jnp.float16, name="out")(jax.nn.softmax(scores) @ v)
        h = nn.gelu(nn.Dense(4 * WIDTH, dtype=jnp.float16, name="up")(Norm()(x)))
        return x + nn.Dense(WIDTH, dtype=jnp.float16, name="down")(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.float16)(ids)
        mask = jnp.tril(jnp.ones((ids.shape[1],) * 2, bool)) & (ids != PADDING)[:, None]
        for _ in range(2):
            x = Block()(x, mask)
        return nn.Dense(VOCABULARY, name="head")(Norm()(x).astype(jnp.float32))


def loss_fn(params, ids):
    logits = Model().apply(params, ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def shapes():
    """The arguments of audit and explain, as shapes."""
    ids = jax.ShapeDtypeStruct((16, 257), jnp.int32)
    return jax.eval_shape(Model().init, jax.random.key(0), ids), ids


def one_batch():
    """Four texts, one of which starts with padding."""
    ids = np.random.default_rng(1).integers(1, VOCABULARY, (4, 33), np.int32)
    ids[2, :5] = PADDING
    return jax.jit(Model().init)(jax.random.key(0), ids), ids


def gradient(params, ids):
    return jax.grad(loss_fn)(params, ids)
