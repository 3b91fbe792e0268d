"""Whole epochs in one compiled call: `lax.scan` over steps, data on the device."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

TX = optax.adamw(optax.cosine_decay_schedule(1e-2, 100))


def model(params, x):
    for w in params[:-1]:
        x = jax.nn.gelu(x @ w)
    return x @ params[-1]


@jax.jit
def epoch(params, state, xs, ys):
    def step(carry, batch):
        params, state = carry
        x, y = batch
        value, grads = jax.value_and_grad(lambda p: jnp.mean(optax.huber_loss(model(p, x), y)))(params)
        updates, state = TX.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, state), values = jax.lax.scan(step, (params, state), (xs, ys))
    return params, state, values


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    params = [jnp.float32(rng.normal(size=shape) / 4) for shape in ((16, 32), (32, 32), (32, 4))]
    state = TX.init(params)
    rule = np.random.default_rng(0).normal(size=(16, 4))
    xs = rng.normal(size=(25, 32, 16)).astype(np.float32)
    for _ in range(args.epochs):
        params, state, values = epoch(params, state, xs, np.tanh(xs @ rule).astype(np.float32))
    print(f"loss {values.mean():.4f}")
    return float(values.mean())


if __name__ == "__main__":
    main()
