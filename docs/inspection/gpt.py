"""A training script in float32, without mpjax: a language model of GPT-2's size, its layers in a scan."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

WIDTH, HEADS, LAYERS, LENGTH, VOCABULARY, BATCH = 768, 12, 12, 1024, 50304, 16


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        q, k, v = jnp.split(nn.Dense(3 * WIDTH, name="qkv")(nn.LayerNorm()(x)), 3, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], HEADS, -1).swapaxes(1, 2) for y in (q, k, v))
        scores = q @ k.swapaxes(-1, -2) / (WIDTH / HEADS) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        y = (jax.nn.softmax(scores) @ v).swapaxes(1, 2).reshape(x.shape)
        x = x + nn.Dense(WIDTH, name="out")(y)
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))), None


class GPT(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCABULARY, WIDTH)(ids)
        layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(VOCABULARY, use_bias=False, name="head")(nn.LayerNorm()(x))


model, tx = GPT(), optax.adamw(3e-4)


def loss_fn(params, ids):
    logits = model.apply(params, ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def train_step(params, opt_state, ids):
    loss, grads = jax.value_and_grad(loss_fn)(params, ids)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


train_step = jax.jit(train_step, donate_argnums=(0, 1))


def shapes():
    ids = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), ids)
    return params, jax.eval_shape(tx.init, params), ids
