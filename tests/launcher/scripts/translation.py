"""An encoder and a decoder with cross attention, label smoothing and padding; a scanned stack of layers."""

import argparse
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY, LENGTH, WIDTH = 16, 8, 32


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, encoded, mask, cross):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), mask=mask)
        if encoded is not None:
            x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x), encoded, mask=cross)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x)))), None


class Translator(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        stack = functools.partial(
            nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
                in_axes=(nn.broadcast,) * 3,
            )
        )
        embed = nn.Embed(VOCABULARY, WIDTH)
        positions = self.param("positions", nn.initializers.normal(0.1), (LENGTH, WIDTH))
        seen = source > 0
        encoded, _ = stack(name="encoder")(embed(source) + positions, None, nn.make_attention_mask(seen, seen), None)
        shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        masks = nn.make_causal_mask(target), nn.make_attention_mask(jnp.ones_like(target), seen)
        decoded, _ = stack(name="decoder")(embed(shifted) + positions, encoded, *masks)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(decoded))


def loss_fn(params, source, target, model):
    logits = model.apply(params, source, target)
    labels = optax.smooth_labels(jax.nn.one_hot(target, VOCABULARY), 0.1)
    weights = (target > 0).astype(jnp.float32)
    return (optax.softmax_cross_entropy(logits, labels) * weights).sum() / weights.sum()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    model, tx = Translator(), optax.adam(3e-3, b2=0.98)
    blank = jnp.ones((1, LENGTH), jnp.int32)
    params = model.init(jax.random.key(args.seed), blank, blank)
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, source, target):
        loss, grads = jax.value_and_grad(loss_fn)(params, source, target, model)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for _ in range(args.steps):
        source = rng.integers(1, VOCABULARY, (32, LENGTH))
        source[:, LENGTH - rng.integers(1, 4) :] = 0
        target = np.where(source > 0, (source * 5) % (VOCABULARY - 1) + 1, 0)
        params, state, loss = step(params, state, source, target)
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
