"""Plain JAX parameters and optax: gradient accumulation, clipping, frozen parameters."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax


def predict(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params["head"]


def loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    layers = [{"w": rng.normal(size=(16, 16)) / 4, "b": np.zeros(16)} for _ in range(2)]
    params = jax.tree.map(jnp.float32, {"layers": layers, "head": rng.normal(size=(16, 4)) / 4})
    labels = {"layers": "train", "head": "slow"}
    inner = optax.multi_transform({"train": optax.adam(1e-2), "slow": optax.sgd(1e-2)}, labels)
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), inner), every_k_schedule=2)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rule = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32) / 4
    for _ in range(args.steps):
        x = rng.normal(size=(32, 16)).astype(np.float32)
        params, state, value = step(params, state, x, x @ rule)
    print(f"loss {value:.4f}")
    return float(value)


if __name__ == "__main__":
    main()
