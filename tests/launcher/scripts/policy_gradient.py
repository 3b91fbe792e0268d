"""An actor and a critic with clipped ratios: several epochs of minibatches, each a scan over compiled updates."""

import argparse
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, name="hidden")(x))
        return nn.log_softmax(nn.Dense(4, name="logits")(x)), nn.Dense(1, name="value")(x)


def loss_fn(params, apply_fn, minibatch):
    states, actions, old, returns, advantages = minibatch
    log_probs, values = apply_fn({"params": params}, states)
    probs = jnp.exp(log_probs)
    entropy = jnp.sum(-probs * log_probs, 1).mean()
    ratios = jnp.exp(jax.vmap(lambda lp, a: lp[a])(log_probs, actions) - old)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = advantages * jnp.clip(ratios, 0.8, 1.2)
    policy = -jnp.mean(jnp.minimum(ratios * advantages, clipped))
    return policy + 0.5 * jnp.mean((returns - values[:, 0]) ** 2) - 0.01 * entropy


@functools.partial(jax.jit, static_argnames="batch")
def train(state, trajectories, *, batch):
    def minibatches(x):
        return x.reshape(-1, batch, *x.shape[1:])

    def update(state, minibatch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, minibatch)
        return state.apply_gradients(grads=grads), loss

    return jax.lax.scan(update, state, jax.tree.map(minibatches, trajectories))


@jax.jit
def act(state, observations):
    return state.apply_fn({"params": state.params}, observations)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    best = np.random.default_rng(0).normal(size=(8, 4))
    model = ActorCritic()
    params = model.init(jax.random.key(args.seed), jnp.ones((1, 8)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(5e-3))
    for _ in range(args.steps):
        x = rng.normal(size=(64, 8)).astype(np.float32)
        log_probs, values = map(np.asarray, act(state, x))
        actions = (log_probs + rng.gumbel(size=log_probs.shape)).argmax(1)
        rewards = (actions == (x @ best).argmax(1)).astype(np.float32)
        old = log_probs[np.arange(64), actions]
        state, losses = train(state, (x, actions, old, rewards, rewards - values[:, 0]), batch=16)
    print(f"loss {losses.mean():.4f}")
    return float(losses.mean())


if __name__ == "__main__":
    main()
