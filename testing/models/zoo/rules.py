"""Custom derivative rules, rematerialisation and `jit`, which a rewrite must keep."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .linen import cross_entropy
from .program import dense_params, labelled, program


def layer_with(layer: Any, key: jax.Array, activation: Any = jnp.tanh) -> tuple[Any, Any, Any]:
    """A network whose layers `layer(x, w)`, or whose activation, have a custom derivative rule."""

    def loss_fn(params, batch):
        x, labels = batch
        for weights in params[:-1]:
            x = activation(layer(x, weights["w"]) + weights["b"])
        return cross_entropy(x @ params[-1]["w"] + params[-1]["b"], labels)

    return loss_fn, dense_params(key, 64, 64, 64, 16), labelled(key, (256, 64))


@jax.custom_vjp
def fused_linear(x, w):
    return x @ w


def _fused_linear_fwd(x, w):
    return x @ w, (x, w)


fused_linear.defvjp(_fused_linear_fwd, lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


@program()
def custom_vjp_linear(key):
    """Matmuls in the function, in its forward rule and in its backward rule."""
    return layer_with(fused_linear, key)


@jax.custom_vjp
def wrong_linear(x, w):
    return x @ w


def _wrong_linear_bwd(kept, g):
    return 0.5 * (g @ kept[1].T), 3.0 * (kept[0].T @ jnp.clip(g, -2e-3, 2e-3))


wrong_linear.defvjp(_fused_linear_fwd, _wrong_linear_bwd)


@program()
def custom_vjp_wrong(key):
    """A deliberately wrong rule: the gradient must be the rule's, not the function's."""
    return layer_with(wrong_linear, key)


@jax.custom_jvp
def smooth(x):
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0.0)


smooth.defjvps(lambda t, out, x: t * jax.nn.sigmoid(x))


@program()
def custom_jvp_softplus(key):
    """exp and log1p under a custom_jvp: float32 inside, the rule kept."""
    return layer_with(lambda x, w: x @ w, key, smooth)


@jax.custom_jvp
def wrong_layer(x, w):
    return jnp.tanh(x @ w)


@wrong_layer.defjvp
def _wrong_layer_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return wrong_layer(x, w), -2.0 * (dx @ w) + 0.25 * (x @ dw)


@program()
def custom_jvp_wrong(key):
    """A deliberately wrong rule with matmuls: the gradient must be the rule's."""
    return layer_with(wrong_layer, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def quantise(x, levels):
    return jnp.round(x * levels) / levels


quantise.defvjp(lambda x, levels: (quantise(x, levels), None), lambda levels, _, g: (g,))


@program()
def straight_through(key):
    """Quantised weights, a straight-through estimator: a static argument and no residuals."""
    return layer_with(lambda x, w: x @ quantise(w, 16), key)


@program()
def checkpoint_policies(key):
    """Blocks under `jax.checkpoint` with three policies, one of them by name."""
    params = dense_params(key, 32, 32, 32, 32, 16)
    policies = jax.checkpoint_policies
    kept = (
        policies.dots_saveable,
        policies.nothing_saveable,
        policies.save_only_these_names("hidden"),
    )

    def layer(layer, x):
        hidden = checkpoint_name(x @ layer["w"] + layer["b"], "hidden")
        return x + jax.nn.gelu(hidden)

    def loss_fn(params, batch):
        x, labels = batch
        for weights, policy in zip(params[:3], kept, strict=True):
            x = jax.checkpoint(layer, policy=policy)(weights, x)
        return cross_entropy(x @ params[3]["w"] + params[3]["b"], labels)

    return loss_fn, params, labelled(key, (256, 32))


@program()
def jit_nested(key):
    """Named jits in jits, one called many times, one with a donated and one with a static argument."""
    params = dense_params(key, *[32] * 7, 16)

    @jax.jit
    def layer(weights, x):
        return jnp.tanh(x @ weights["w"] + weights["b"])

    @functools.partial(jax.jit, static_argnames="scale", donate_argnums=1)
    def head(weights, x, *, scale):
        return scale * (layer(weights, x) @ weights["w"].T)

    @jax.jit
    def network(params, x):
        for weights in params[:5]:
            x = layer(weights, x)
        return head(params[5], x, scale=0.5) @ params[6]["w"]

    def loss_fn(params, batch):
        return cross_entropy(network(params, batch[0]), batch[1])

    return loss_fn, params, labelled(key, (256, 32))
