"""A graph network with segment sums, several labels a graph, missing labels and padding."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

GRAPHS, NODES, TASKS = 16, 6, 4


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, nodes, senders, receivers, graph):
        x = nn.Dense(32)(nodes)
        for _ in range(2):
            messages = nn.relu(nn.Dense(32)(jnp.concatenate([x[senders], x[receivers]], -1)))
            received = jax.ops.segment_sum(messages, receivers, x.shape[0])
            x = nn.LayerNorm()(x + nn.relu(nn.Dense(32)(jnp.concatenate([x, received], -1))))
        return nn.Dense(TASKS)(jax.ops.segment_sum(x, graph, GRAPHS) / NODES)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    model, tx = GraphNet(), optax.adam(5e-3)
    graph = np.repeat(np.arange(GRAPHS), NODES)
    rule = np.random.default_rng(0).normal(size=(8, TASKS))

    @jax.jit
    def train_step(params, state, nodes, senders, receivers, labels):
        def loss_fn(params):
            logits = model.apply(params, nodes, senders, receivers, graph)
            known = ~jnp.isnan(labels)
            losses = optax.sigmoid_binary_cross_entropy(logits, jnp.where(known, labels, 0.0))
            return jnp.sum(jnp.where(known, losses, 0.0)) / jnp.sum(known), logits

        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def batch():
        nodes = rng.normal(size=(GRAPHS * NODES, 8)).astype(np.float32)
        senders = rng.integers(0, NODES, 3 * GRAPHS * NODES) + np.repeat(np.arange(GRAPHS), 3 * NODES) * NODES
        receivers = np.repeat(np.arange(GRAPHS * NODES), 3)
        labels = (nodes.reshape(GRAPHS, NODES, 8).mean(1) @ rule > 0) * 1.0
        return nodes, senders, receivers, np.where(rng.random(labels.shape) < 0.1, np.nan, labels).astype(np.float32)

    params = model.init(jax.random.key(args.seed), *batch()[:3], graph)
    state = tx.init(params)
    for _ in range(args.steps):
        params, state, loss = train_step(params, state, *batch())
    print(f"loss {loss:.4f}")
    return float(loss)


if __name__ == "__main__":
    main()
