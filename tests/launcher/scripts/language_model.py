"""A causal transformer on a mesh: `jit` with shardings and donation, dropout, AdamW with warm-up."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

VOCABULARY, LENGTH, WIDTH = 32, 16, 32


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens, deterministic=True):
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            y = nn.MultiHeadDotProductAttention(4, dropout_rate=0.1, deterministic=deterministic)(
                nn.LayerNorm()(x), mask=mask
            )
            x = x + nn.Dropout(0.1, deterministic=deterministic)(y)
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x)) / np.sqrt(WIDTH)


def train_step(state, tokens, rng):
    rng = jax.random.fold_in(rng, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens, deterministic=False, rngs={"dropout": rng})
        targets = jnp.roll(tokens, -1, 1)
        weights = jnp.where(jnp.arange(LENGTH) < LENGTH - 1, 1.0, 0.0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights
        return losses.sum() / (weights.sum() * tokens.shape[0])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    model = Decoder()
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    data, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    params = model.init(jax.random.key(args.seed), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.0, 1e-2, 10), weight_decay=0.01)
    )
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    shardings = jax.tree.map(lambda _: everywhere, state)
    step = jax.jit(
        train_step,
        in_shardings=(shardings, data, None),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )
    for _ in range(args.steps):
        start = rng.integers(0, VOCABULARY, (16, 1))
        tokens = (start + 3 * np.arange(LENGTH)) % VOCABULARY
        state, loss = step(state, jax.device_put(tokens, data), jax.random.key(args.seed))
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
