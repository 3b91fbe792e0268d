"""A program in the style of ott-jax: entropic optimal transport by Sinkhorn iterations, differentiated implicitly.

Libraries of solvers nest jits and custom derivative rules: each iteration, kernel and norm is a jitted function, the
loop is a `custom_vjp`, and its backward rule solves a linear system.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from testing.zoo.program import REGISTRY, Program, program

NAME = "sinkhorn"
POINTS, FEATURES, ITERATIONS, EPSILON = 32, 8, 20, 0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def safe_log(x: jax.Array, smallest: float) -> jax.Array:
    """The logarithm of values that may be 0, with a finite gradient."""
    return jnp.log(jnp.maximum(x, smallest))


safe_log.defvjp(
    lambda x, smallest: (safe_log(x, smallest), x),
    lambda smallest, x, ct: (ct / jnp.maximum(x, smallest),),
)


@jax.jit
def squared_norms(x: jax.Array) -> jax.Array:
    """The squared norm of each row."""
    return jnp.sum(x**2, axis=-1)


@jax.jit
def costs(x: jax.Array, y: jax.Array) -> jax.Array:
    """Squared distances between the rows of two point clouds."""
    cross = jax.vmap(lambda a: jax.vmap(lambda b: jnp.dot(a, b))(y))(x)
    return squared_norms(x)[:, None] + squared_norms(y)[None] - 2 * cross


@functools.partial(jax.jit, static_argnums=3)
def softmin(cost: jax.Array, potential: jax.Array, weights: jax.Array, axis: int) -> jax.Array:
    """The soft minimum over one point cloud, which updates the potential of the other."""
    shape = (-1, 1) if axis == 0 else (1, -1)
    scores = (potential.reshape(shape) - cost) / EPSILON + safe_log(weights, 1e-30).reshape(shape)
    return -EPSILON * jax.nn.logsumexp(scores, axis=axis)


@jax.jit
def iteration(f: jax.Array, cost: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """One update of both potentials."""
    g = softmin(cost, f, a, 0)
    return softmin(cost, g, b, 1)


@jax.custom_vjp
def fixed_point(cost: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """The potential at which the iteration stays."""

    def more(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return (state[0] < ITERATIONS) & (state[2] > 1e-6)

    def update(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        count, f, _ = state
        new = iteration(f, cost, a, b)
        return count + 1, new, jnp.max(jnp.abs(new - f))

    return jax.lax.while_loop(more, update, (jnp.int32(0), jnp.zeros(len(a)), jnp.float32(jnp.inf)))[1]


def _forward(cost: jax.Array, a: jax.Array, b: jax.Array) -> Any:
    f = fixed_point(cost, a, b)
    return f, (f, cost, a, b)


def _backward(saved: Any, ct: jax.Array) -> Any:
    """The implicit function theorem: solves (I - J)ᵀ u = ct, then applies the derivative of one iteration to u."""
    f, *inputs = saved
    _, by_potential = jax.vjp(lambda f: iteration(f, *inputs), f)
    _, by_inputs = jax.vjp(lambda *inputs: iteration(f, *inputs), *inputs)

    def operator(u: jax.Array) -> jax.Array:
        (out,) = by_potential(u)
        return u - out + jnp.sum(u) / len(u)  # Potentials are unique up to a constant.

    u, _ = jax.scipy.sparse.linalg.bicgstab(operator, ct, maxiter=5)
    return by_inputs(u)


fixed_point.defvjp(_forward, _backward)


@jax.jit
def transport_cost(x: jax.Array, y: jax.Array) -> jax.Array:
    """The entropic transport cost of two point clouds with equal weights."""
    a, b = jnp.full(len(x), 1 / len(x)), jnp.full(len(y), 1 / len(y))
    cost = costs(x, y)
    f = fixed_point(cost, a, b)
    return jnp.sum(f * a) + jnp.sum(softmin(cost, f, a, 0) * b)


def register() -> Program:
    """Adds the program to the zoo."""

    def sinkhorn(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        params = jax.random.normal(keys[0], (FEATURES, FEATURES)) / 4
        batch = tuple(jax.random.normal(k, (POINTS, FEATURES)) for k in keys[1:])

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            x, y = (jnp.tanh(part @ params) for part in batch)
            # The Sinkhorn divergence: the cost between the clouds less that within each.
            return transport_cost(x, y) - 0.5 * (transport_cost(x, x) + transport_cost(y, y))

        return loss_fn, params, batch

    program()(sinkhorn)
    return REGISTRY[NAME]
