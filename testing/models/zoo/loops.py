"""Loops and branches: `scan`, `while`, `fori`, `cond`, `switch`, `map`, `associative_scan`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from .linen import cross_entropy
from .program import dense_params, labelled, program


@program(has_half=True)
def scan_lstm(key, dtype=None):
    """A hand-written LSTM: one fused weight, a carry of zeros at the start."""
    weights, head = dense_params(key, 64, 128)[0], dense_params(key, 32, 16)[0]

    def loss_fn(params, batch):
        inputs, labels = batch
        if dtype is not None:
            params, inputs = jax.tree.map(lambda x: x.astype(dtype), (params, inputs))
        cell, head = params["cell"], params["head"]

        def step(carry, x):
            c, h = carry
            gates = jnp.concatenate([x, h], -1) @ cell["w"] + cell["b"]
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (c, h), h

        zeros = jnp.zeros((inputs.shape[0], 32), inputs.dtype)
        _, hs = lax.scan(step, (zeros, zeros), inputs.swapaxes(0, 1))
        return cross_entropy(hs[-1] @ head["w"] + head["b"], labels)

    return loss_fn, {"cell": weights, "head": head}, labelled(key, (64, 8, 32))


@program()
def scan_accumulator(key):
    """Micro-batches under a scan: the carry accumulates the loss from zero."""
    params = dense_params(key, 64, 64, 16)

    def loss_fn(params, batch):
        def step(total, batch):
            hidden = jnp.tanh(batch[0] @ params[0]["w"] + params[0]["b"])
            logits = hidden @ params[1]["w"] + params[1]["b"]
            return total + cross_entropy(logits, batch[1]), jnp.max(logits)

        total, peaks = lax.scan(step, 0.0, batch)
        return total / len(peaks) + 1e-3 * jnp.mean(peaks)

    inputs, labels = labelled(key, (256, 64))
    return loss_fn, params, (inputs.reshape(4, 64, 64), labels.reshape(4, 64))


@program()
def fori_matmul(key):
    """A `fori_loop` of known length is a scan, and so has a gradient."""
    weight = jax.random.normal(key, (32, 32)) / 32**0.5

    def loss_fn(weight, x):
        state = lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ weight + 0.1 * i), x)
        return jnp.mean(state**2)

    return loss_fn, weight, jax.random.normal(key, (128, 32))


@program(differentiable=False)
def while_power(key):
    """Power iteration with steps that are halved: the trip count of the `while` depends on the data."""
    matrix = jax.random.normal(key, (32, 32)) / 32**0.5

    def loss_fn(matrix, x):
        def unfinished(state):
            count, _, size = state
            return (count < 8) & (size > 1e-2)

        def step(state):
            count, x, size = state
            return count + 1, size * jnp.tanh(x @ matrix) + x, size / 2

        count, x, _ = lax.while_loop(unfinished, step, (0, x, jnp.max(jnp.abs(x))))
        return jnp.mean(x**2) + 0.0 * count

    return loss_fn, matrix, jax.random.normal(key, (32, 32))


@program()
def cond_branches(key):
    """Branches whose result dtypes match in float32 but would differ in half: a matmul in one, none in the other."""
    params = dense_params(key, 64, 64, 64, 16)

    def loss_fn(params, batch):
        inputs, labels, flag = batch
        x = inputs @ params[0]["w"] + params[0]["b"]
        x = lax.cond(flag, lambda x: jax.nn.silu(x @ params[1]["w"]), lambda x: x - params[1]["b"], x)
        x = lax.cond(jnp.sum(x) > 0, lambda x: x @ params[2]["w"], lambda x: x[:, :16] * 2.0, x)
        return cross_entropy(x, labels)

    return loss_fn, params, (*labelled(key, (256, 64)), jnp.array(True))


@program()
def switch_experts(key):
    """`switch` over three layers inside a scan: the branch is chosen by an integer input."""
    experts = dense_params(key, 32, 32, 32, 32)

    def loss_fn(experts, batch):
        inputs, choices = batch
        branches = [
            lambda x: jnp.tanh(x @ experts[0]["w"]),
            lambda x: x @ experts[1]["w"] + experts[1]["b"],
            lambda x: jax.nn.softmax(x @ experts[2]["w"]),
        ]
        x, _ = lax.scan(lambda x, i: (lax.switch(i, branches, x), None), inputs, choices)
        return jnp.mean(x**2)

    return loss_fn, experts, (jax.random.normal(key, (128, 32)), jnp.array([0, 1, 2, 1]))


@program()
def map_over_heads(key):
    """`lax.map` in batches of a function with matmuls."""
    params = dense_params(key, 32, 64, 16)

    def loss_fn(params, batch):
        def one(x):
            return jax.nn.silu(x @ params[0]["w"] + params[0]["b"]) @ params[1]["w"]

        return cross_entropy(lax.map(one, batch[0], batch_size=64), batch[1])

    return loss_fn, params, labelled(key, (256, 32))


@program()
def linear_recurrence(key):
    """A diagonal state-space layer: projections around a `lax.associative_scan`."""
    params = {"layers": dense_params(key, 32, 32, 32), "decay": jnp.linspace(0.1, 2.0, 32)}

    def loss_fn(params, x):
        first, last = params["layers"]
        drive = x @ first["w"] + first["b"]
        decay = jnp.broadcast_to(jax.nn.sigmoid(params["decay"]), drive.shape)
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        _, states = lax.associative_scan(combine, (decay, drive), axis=1)
        return jnp.mean((states @ last["w"] + last["b"]) ** 2)

    return loss_fn, params, jax.random.normal(key, (32, 8, 32))
