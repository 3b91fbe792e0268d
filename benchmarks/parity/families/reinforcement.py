"""Training on data that the model generates."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parity.family import MODEL, Batch, Family, Models, adam

ENVIRONMENTS, HORIZON, LIMIT = 32, 64, 200
DISCOUNT, SMOOTHING, CLIP, PASSES = 0.98, 0.95, 0.2, 4


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, observed: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.tanh(nn.Dense(32)(observed))
        logits = nn.Dense(2, kernel_init=nn.initializers.normal(0.01))(jnp.tanh(nn.Dense(32)(x)))
        return logits, nn.Dense(1)(jnp.tanh(nn.Dense(32)(x)))[..., 0]


def advance(state: jax.Array, push: jax.Array) -> jax.Array:
    """One step of 20 ms: position, velocity, angle, angular velocity; Euler's method."""
    x, v, angle, spin = jnp.moveaxis(state, -1, 0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    inner = (jnp.where(push == 1, 10.0, -10.0) + 0.05 * spin**2 * sine) / 1.1
    angular = (9.8 * sine - cosine * inner) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    linear = inner - 0.05 * angular * cosine / 1.1
    return jnp.stack([x + 0.02 * v, v + 0.02 * linear, angle + 0.02 * spin, spin + 0.02 * angular], -1)


def has_fallen(state: jax.Array) -> jax.Array:
    return (jnp.abs(state[..., 0]) > 2.4) | (jnp.abs(state[..., 2]) > 0.2095)


def rollouts(models: Models, batch: Batch) -> Batch:
    """Plays, and estimates advantages; a fallen pole starts again. `batch` holds all randomness."""

    def play(state: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Batch]:
        noise, start = inputs
        logits, value = models(state)
        action = jnp.argmax(logits + noise, -1)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], -1)[:, 0]
        new_state = advance(state, action)
        done = has_fallen(new_state)
        trajectory = {"observed": state, "action": action, "log_prob": log_prob, "value": value, "done": done}
        return jnp.where(done[:, None], start, new_state), trajectory

    last, trajectory = jax.lax.scan(play, batch["start"][0], (batch["noise"], batch["start"]))
    next_values = jnp.concatenate([trajectory["value"][1:], models(last)[1][None]])
    alive = 1.0 - trajectory["done"]
    td_error = alive + DISCOUNT * alive * next_values - trajectory["value"]

    def accumulate(total: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total = step[0] + DISCOUNT * SMOOTHING * step[1] * total
        return total, total

    advantage = jax.lax.scan(accumulate, jnp.zeros(ENVIRONMENTS), (td_error, alive), reverse=True)[1]
    scaled = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-6)
    return {**trajectory, "advantage": scaled, "returns": advantage + trajectory["value"]}


def loss(models: Models, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    logits, value = models(batch["observed"])
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["action"][..., None], -1)[..., 0]
    ratio = jnp.exp(log_prob - batch["log_prob"])
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    objective = jnp.minimum(ratio * batch["advantage"], clipped * batch["advantage"])
    return jnp.mean(0.01 * (value - batch["returns"]) ** 2 - objective), {}


def batch(rng: np.random.Generator) -> Batch:
    return {
        "noise": rng.gumbel(size=(HORIZON, ENVIRONMENTS, 2)).astype(np.float32),
        "start": rng.uniform(-0.05, 0.05, (HORIZON, ENVIRONMENTS, 4)).astype(np.float32),
    }


def lifetimes(models: Models, start: jax.Array) -> jax.Array:
    """Steps until the pole falls, with the likeliest actions."""

    def play(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, alive = carry
        new_state = advance(state, jnp.argmax(models(state)[0], -1))
        alive &= ~has_fallen(new_state)
        return (new_state, alive), alive

    alive = jax.lax.scan(play, (start, jnp.ones(len(start), bool)), length=LIMIT)[1]
    return jnp.mean(jnp.sum(alive, 0).astype(jnp.float32))


def ppo() -> Family:
    """Proximal policy optimization (Schulman et al., 2017) on the cart-pole of Barto et al. (1983), written in JAX."""
    return Family(
        name="PPO",
        data="cart-pole, written in JAX; wider starting positions held out",
        metric="steps balanced of 200",
        modules={MODEL: ActorCritic()},
        losses={MODEL: loss},
        example=lambda batch: {MODEL: (batch["start"][0],)},
        batch=batch,
        test=lambda: np.random.default_rng(10**6).uniform(-0.2, 0.2, (256, 4)).astype(np.float32),
        predict=lifetimes,
        score=lambda value, test: float(value),
        optimizer=adam(5e-3, clip=0.5),
        steps=40,
        prepare=rollouts,
        passes=PASSES,
    )
