"""Small steps to plan, and the forms that a plan recommends, written by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import mpjax
from mpjax.planning.traffic import program_bytes

LAYERS, WIDTH, ROWS = 6, 64, 512


def loss_fn(params, x):
    def body(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(body, x, params)
    return jnp.mean(x**2)


def checkpointed(params, x):
    def body(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, params)
    return jnp.mean(x**2)


def offloaded(params, x):
    def body(x, w):
        x = checkpoint_name(x, "x")
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    x, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False, policy=policy), x, params)
    return jnp.mean(x**2)


def step_of(loss, tx=None, value_and_grad=None):
    """A training step of a loss, not jitted."""
    tx = tx or optax.adam(1e-3)

    def train_step(params, opt_state, x):
        value, grads = (value_and_grad or jax.value_and_grad)(loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return train_step


def shapes(tx=None, rows=ROWS, width=WIDTH, dtype=jnp.float32):
    """The arguments of such a step, as shapes."""
    matrix = jax.ShapeDtypeStruct((LAYERS, width, width), dtype)
    params = {"up": matrix, "down": matrix}
    opt_state = jax.eval_shape((tx or optax.adam(1e-3)).init, params)
    return params, opt_state, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def arrays(key=0):
    """Arguments of the loss."""
    keys = jax.random.split(jax.random.key(key), 3)
    up, down = (jax.random.normal(k, (LAYERS, WIDTH, WIDTH)) / 8 for k in keys[:2])
    return {"up": up, "down": down}, jax.random.normal(keys[2], (ROWS, WIDTH))


def compiled_bytes(fun, *args, donate=(0, 1)):
    """XLA's plan of a function, compiled as a user would."""
    return program_bytes(jax.jit(fun, donate_argnums=donate).lower(*args).compile())


def half(loss, **rules):
    return mpjax.autocast(loss, "mixed_bfloat16", rules=mpjax.Rules(**rules) if rules else None)


def attention_loss(params, x):
    """One layer of attention and a softmax cross-entropy over a vocabulary, as they are written."""
    q, k, v = (x @ params[name] for name in "qkv")
    scores = q @ k.swapaxes(-1, -2) / jnp.float32(8)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    y = jax.nn.softmax(scores) @ v
    logits = y @ params["head"]
    labels = jnp.zeros(x.shape[:2], jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def attention_shapes(batch=4, length=128, vocabulary=1024):
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = dict.fromkeys("qkv", matrix) | {"head": jax.ShapeDtypeStruct((WIDTH, vocabulary), jnp.float32)}
    return params, jax.ShapeDtypeStruct((batch, length, WIDTH), jnp.float32)
