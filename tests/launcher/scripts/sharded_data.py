"""Data parallelism by `shard_map`: each device differentiates its part, the gradients are averaged."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

TX = optax.adam(3e-3)


def loss_fn(params, x, y):
    hidden = jax.nn.relu(x @ params["in"])
    return jnp.mean((hidden @ params["out"] - y) ** 2)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, split = PartitionSpec(), PartitionSpec("data")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(everywhere, everywhere, split, split), out_specs=everywhere)
    def step(params, state, x, y):
        varying = jax.tree.map(lambda p: jax.lax.pcast(p, ("data",), to="varying"), params)
        value, grads = jax.value_and_grad(loss_fn)(varying, x, y)
        value, grads = jax.lax.pmean((value, grads), "data")
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(args.seed)
    params = {"in": jnp.float32(rng.normal(size=(16, 64)) / 4), "out": jnp.float32(rng.normal(size=(64, 4)) / 8)}
    state = TX.init(params)
    rule = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    for _ in range(args.steps):
        x = rng.normal(size=(32, 16)).astype(np.float32)
        params, state, value = step(params, state, x, x @ rule)
    print(f"loss {value:.4f}")
    return float(value)


if __name__ == "__main__":
    main()
