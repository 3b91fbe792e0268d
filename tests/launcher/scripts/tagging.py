"""A tagger of sequences: a bidirectional transformer, weighted losses, evaluation between the steps."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

WORDS, TAGS, LENGTH, WIDTH = 24, 6, 10, 32


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, words):
        x = nn.Embed(WORDS, WIDTH)(words)
        x = x + jnp.sin(jnp.arange(LENGTH)[:, None] / 10000 ** (jnp.arange(WIDTH) / WIDTH))
        mask = nn.make_attention_mask(words > 0, words > 0)
        x = x + nn.SelfAttention(4)(nn.LayerNorm()(x), mask)
        x = x + nn.Dense(WIDTH)(nn.elu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(TAGS)(nn.LayerNorm()(x))


def weighted(logits, tags, weights):
    losses = -jnp.sum(jax.nn.one_hot(tags, TAGS) * nn.log_softmax(logits), -1) * weights
    return losses.sum() / weights.sum()


@jax.jit
def train_step(state, words, tags):
    weights = jnp.where(words > 0, 1, 0).astype(jnp.float32)
    loss, grads = jax.value_and_grad(lambda p: weighted(state.apply_fn({"params": p}, words), tags, weights))(
        state.params
    )
    return state.apply_gradients(grads=grads), loss


@jax.jit
def eval_step(params, words, tags):
    logits = Tagger().apply({"params": params}, words)
    return jnp.sum((jnp.argmax(logits, -1) == tags) * (words > 0)), jnp.sum(words > 0)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    model = Tagger()
    params = model.init(jax.random.key(args.seed), jnp.ones((1, LENGTH), jnp.int32))["params"]
    tx = optax.adamw(lambda step: 5e-3 * jnp.minimum(1.0, (step + 1) / 8), b1=0.9, b2=0.98, weight_decay=1e-1)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for i in range(args.steps):
        words = rng.integers(1, WORDS, (32, LENGTH)) * (np.arange(LENGTH) < rng.integers(5, LENGTH + 1, (32, 1)))
        tags = (words + np.roll(words, 1, 1) * 0) % TAGS
        state, loss = train_step(state, words, tags)
        if i % 25 == 0:
            eval_step(state.params, words, tags)
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
