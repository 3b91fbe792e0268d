"""Faults of policies on NNX modules: modules that stay in float32, warn too often or cannot run."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import mpjax
from testing.measures import half_share

from .fault import Fault, does_not_run

X = jnp.ones((8, 8))
MIXED = "mixed_float16"


def nnx_half_share(model: Any, x: jax.Array = X) -> float:
    """The share of an NNX model's matmul FLOPs in half."""
    graph, state = nnx.split(model)
    return half_share(lambda state, x: nnx.merge(graph, state, copy=True)(x), state, x)


def jitted_methods_lose_the_policy() -> bool:
    class Jitted(nnx.Module):
        def __init__(self) -> None:
            self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        @nnx.jit
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(x)

    jitted = mpjax.with_policy(Jitted(), MIXED)
    return jitted(X).dtype != jnp.float32 or nnx_half_share(jitted) < 1


def rematerialised_method_fails() -> bool:
    class Remat(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(X)

        @nnx.remat
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w

    model = mpjax.with_policy(Remat(), MIXED)
    return does_not_run(lambda: nnx.grad(lambda m: m(X).sum())(model))


def decoding_fails() -> bool:
    def decode() -> Any:
        model = mpjax.with_policy(nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0)), MIXED)
        model.init_cache((2, 3, 8))
        return model(jnp.ones((2, 1, 8)))

    return does_not_run(nnx.jit(decode))


def bridged_module_fails() -> bool:
    model = mpjax.with_policy(nnx.bridge.to_linen(nnx.Linear, 8, 8), MIXED)
    return does_not_run(lambda: jax.jit(model.init)(jax.random.key(0), X))


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.embed = nnx.Embed(11, 8, rngs=nnx.Rngs(0))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens) @ self.embed.embedding.T


def tied_weights_stay_in_float32() -> bool:
    return nnx_half_share(mpjax.with_policy(Tied(), MIXED), jnp.zeros((2, 3), int)) < 1


def batch_casts_warn_repeatedly() -> bool:
    """Casting a batch by a policy with overrides: a pattern for the model's paths matches nothing in it."""
    policy = mpjax.Policy("float32", "float16", "float32", [("*/head", "float32")])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            policy.cast_to_compute({"image": X})
    return len(found) > 1


def nnx_modules_have_no_names() -> bool:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.up(x)

    graph, state = nnx.split(mpjax.with_policy(Model(), MIXED))
    report = mpjax.audit(lambda state, x: nnx.merge(graph, state, copy=True)(x), state, X)
    return not any("up" in str(row.module) for row in report.matmuls)


FAULTS = [
    Fault("an NNX method under jit loses the policy", {"mpjax": jitted_methods_lose_the_policy}),
    Fault("an NNX method under remat fails", {"mpjax": rematerialised_method_fails}),
    Fault("decoding with an NNX attention's cache fails", {"mpjax": decoding_fails}),
    Fault("an NNX module in a Linen model fails", {"mpjax": bridged_module_fails}),
    Fault("weights tied by hand are read in float32", {"mpjax": tied_weights_stay_in_float32}),
    Fault("casting a batch warns at every call", {"mpjax": batch_casts_warn_repeatedly}),
    Fault("NNX modules have no names in reports", {"mpjax": nnx_modules_have_no_names}),
]
