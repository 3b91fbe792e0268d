"""Haiku on digits: a transformed function, plain optax, an average of the parameters."""

import argparse
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class State(NamedTuple):
    params: hk.Params
    average: hk.Params
    opt: optax.OptState


def net(x):
    return hk.Sequential([hk.Flatten(), hk.Linear(64), jax.nn.relu, hk.Linear(32), jax.nn.relu, hk.Linear(10)])(x)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    network, optimiser = hk.without_apply_rng(hk.transform(net)), optax.adam(3e-3)

    def loss(params, images, labels):
        logits = network.apply(params, images)
        decay = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return -jnp.mean(jnp.sum(jax.nn.one_hot(labels, 10) * jax.nn.log_softmax(logits), -1)) + 1e-4 * decay

    @jax.jit
    def update(state, images, labels):
        grads = jax.grad(loss)(state.params, images, labels)
        updates, opt = optimiser.update(grads, state.opt)
        params = optax.apply_updates(state.params, updates)
        return State(params, optax.incremental_update(params, state.average, 0.1), opt)

    rng = np.random.default_rng(args.seed)
    digits = load_digits()
    pixels = digits.images.astype(np.float32) / 16
    params = network.init(jax.random.PRNGKey(args.seed), pixels[:1])
    state = State(params, params, optimiser.init(params))
    for _ in range(args.steps):
        chosen = rng.integers(0, 1500, 64)
        state = update(state, pixels[chosen], digits.target[chosen])
    final = jax.jit(loss)(state.average, pixels[1500:], digits.target[1500:])
    print(f"loss {final:.4f}")
    return float(final)


if __name__ == "__main__":
    main()
