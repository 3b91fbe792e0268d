"""Equinox: a GRU scanned over spirals, `filter_jit` and `filter_value_and_grad`."""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(2, 32, key=one)
        self.linear = eqx.nn.Linear(32, 1, key=two)

    def __call__(self, xs):
        def step(carry, x):
            return self.cell(x, carry), None

        return jax.nn.sigmoid(self.linear(jax.lax.scan(step, jnp.zeros(32), xs)[0]))[0]


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)

    @eqx.filter_value_and_grad
    def compute_loss(model, x, y):
        predicted = jax.vmap(model)(x)
        return -jnp.mean(y * jnp.log(predicted + 1e-6) + (1 - y) * jnp.log(1 - predicted + 1e-6))

    optim = optax.adam(1e-2)

    @eqx.filter_jit
    def make_step(model, x, y, opt_state):
        loss, grads = compute_loss(model, x, y)
        updates, opt_state = optim.update(grads, opt_state)
        return loss, eqx.apply_updates(model, updates), opt_state

    model = RNN(jax.random.key(args.seed))
    opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    for _ in range(args.steps):
        y = rng.integers(0, 2, 32)
        angle = rng.random((32, 1)) + np.linspace(0, 4, 12) * (2 * y[:, None] - 1)
        x = np.stack([np.sin(angle), np.cos(angle)], -1).astype(np.float32)
        loss, model, opt_state = make_step(model, x, y.astype(np.float32), opt_state)
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
