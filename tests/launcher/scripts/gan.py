"""A GAN: two networks, two optimizers, a gradient penalty, both steps in one compiled function."""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class MLP(nn.Module):
    out: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.leaky_relu(nn.Dense(32)(x))
        return nn.Dense(self.out)(x)


GENERATOR, CRITIC = MLP(2), MLP(1)


def critic_loss(params, real, fake, key):
    mixed = jax.random.uniform(key, (len(real), 1))
    mixed = mixed * real + (1 - mixed) * fake
    slopes = jax.vmap(jax.grad(lambda x: CRITIC.apply(params, x[None])[0, 0]))(mixed)
    penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12) - 1) ** 2)
    return jnp.mean(CRITIC.apply(params, fake)) - jnp.mean(CRITIC.apply(params, real)) + 10.0 * penalty


def generator_loss(params, critic, z):
    return -jnp.mean(CRITIC.apply(critic, GENERATOR.apply(params, z)))


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(args.seed)
    keys = jax.random.split(jax.random.key(args.seed))
    generator, critic = GENERATOR.init(keys[0], jnp.ones((1, 4))), CRITIC.init(keys[1], jnp.ones((1, 2)))
    generator_tx, critic_tx = optax.adam(1e-3, b1=0.5), optax.adam(3e-3, b1=0.5)
    states = generator_tx.init(generator), critic_tx.init(critic)

    @jax.jit
    def step(generator, critic, states, real, z, key):
        of_generator, of_critic = states
        value, grads = jax.value_and_grad(critic_loss)(critic, real, GENERATOR.apply(generator, z), key)
        updates, of_critic = critic_tx.update(grads, of_critic)
        critic = optax.apply_updates(critic, updates)
        grads = jax.grad(generator_loss)(generator, critic, z)
        updates, of_generator = generator_tx.update(grads, of_generator)
        return optax.apply_updates(generator, updates), critic, (of_generator, of_critic), value

    values = []
    for i in range(args.steps):
        angle = 2 * np.pi * rng.random((64, 1))
        real = np.concatenate([np.sin(angle), np.cos(angle)], 1).astype(np.float32)
        z = rng.normal(size=(64, 4)).astype(np.float32)
        generator, critic, states, value = step(generator, critic, states, real, z, jax.random.key(i))
        values.append(float(value))
    print(f"loss {np.mean(values[-10:]):.4f}")
    return float(np.mean(values[-10:]))


if __name__ == "__main__":
    main()
