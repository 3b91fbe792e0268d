"""A variational autoencoder of digits: random numbers in the loss, a summed loss, evaluation and sampling."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits


class VAE(nn.Module):
    def setup(self):
        self.encoder = nn.Dense(64)
        self.mean, self.logvar = nn.Dense(4), nn.Dense(4)
        self.decoder = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64)])

    def __call__(self, x, key):
        hidden = nn.relu(self.encoder(x))
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        return self.decoder(z), mean, logvar

    def generate(self, z):
        return nn.sigmoid(self.decoder(z))


def compute_loss(logits, x, mean, logvar):
    bce = -jnp.sum(x * nn.log_sigmoid(logits) + (1 - x) * jnp.log1p(-jnp.clip(nn.sigmoid(logits), 0, 1 - 1e-6)), -1)
    kld = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1)
    return jnp.sum(bce + kld)


@jax.jit
def train_step(state, x, key):
    def loss_fn(params):
        return compute_loss(*[(o := state.apply_fn({"params": params}, x, key))[0], x, *o[1:]])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss / len(x)


@jax.jit
def sample(params, z):
    return VAE().apply({"params": params}, z, method="generate")


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    pixels = (load_digits().data > 8).astype(np.float32)
    model = VAE()
    params = model.init(jax.random.key(args.seed), jnp.ones((1, 64)), jax.random.key(0))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))
    key = jax.random.PRNGKey(args.seed)
    for _ in range(args.steps):
        x = pixels[rng.integers(0, len(pixels), 64)]
        key, used = jax.random.split(key)
        state, loss = train_step(state, x, used)
    assert sample(state.params, jnp.zeros((2, 4))).shape == (2, 64)
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
