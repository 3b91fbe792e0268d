"""Faults of policies on Flax modules: what is left in float32, computed twice, or can not be run."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
from flax import nnx

import mpjax
from testing.measures import half_share

from .casting import CASTERS
from .fault import Fault, does_not_run

X = jnp.ones((8, 8))
W = jnp.ones((8, 8))
MIXED = "mixed_float16"


def nnx_share(model: Any, x: jax.Array = X) -> float:
    """The share of an NNX model's matmul FLOPs in half."""
    graph, state = nnx.split(model)
    return half_share(lambda state, x: nnx.merge(graph, state, copy=True)(x), state, x)


class Doubled(nnx.Param):
    """A variable with a read transform."""

    def get_value(self, **kwargs: Any) -> Any:
        return super().get_value(**kwargs) * 2


class Reads(nnx.Module):
    def __init__(self) -> None:
        self.w = Doubled(W)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[...]


def transformed_twice() -> bool:
    model = mpjax.with_policy(Reads(), "O3")
    return float(model(X)[0, 0]) != 16.0 or float(model.w.get_raw_value()[0, 0]) != 1.0


def jmp_transforms_twice() -> bool:
    graph, state = nnx.split(Reads())
    half = jmp.get_policy("half").cast_to_compute(state)
    return float(nnx.merge(graph, half)(X.astype(jmp.half_dtype()))[0, 0]) != 16.0


def norm_parameters_are_half() -> bool:
    model = mpjax.with_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm()]), "O2")
    scale = jax.eval_shape(model.init, jax.random.key(0), X)["params"]["layers_1"]["scale"]
    return scale.dtype != jnp.float32


def keras_norm_parameters_are_half() -> bool:
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    layer = keras.layers.LayerNormalization(dtype=MIXED)
    layer.build((None, 8))
    return any(w.dtype != "float32" for w in layer.weights)


class InFloat32(nn.Module):
    """A model whose layers take their dtype from a default."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8, dtype=self.dtype)(x)


def explicit_dtypes_win_silently(wrap: Callable[[nn.Module], Callable[..., Any]]) -> bool:
    model = InFloat32()
    variables = model.init(jax.random.key(0), X)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        share = half_share(wrap(model), variables, X)
    return share < 1 and not found


def _cast_apply(caster: Callable[[Callable[..., Any]], Callable[..., Any]], model: nn.Module) -> Callable[..., Any]:
    return caster(model.apply)


class Encoder(nn.Module):
    def setup(self) -> None:
        self.dense = nn.Dense(8)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x)


def parts_lose_the_policy() -> bool:
    """Of a bound model, and NNX methods under jit, and layers that come later."""
    model = mpjax.with_policy(Encoder(), MIXED)
    variables = model.init(jax.random.key(0), X)
    if half_share(lambda v, x: model.bind(v).dense(x), variables, X) < 1:
        return True

    class Jitted(nnx.Module):
        def __init__(self) -> None:
            self.linear: Any = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        @nnx.jit
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(x)

    jitted = mpjax.with_policy(Jitted(), MIXED)
    if jitted(X).dtype != jnp.float32:
        return True
    jitted.linear = nnx.LoRA(8, 2, 8, base_module=jitted.linear, rngs=nnx.Rngs(1))
    return nnx_share(jitted) < 1


def rematerialised_method_fails() -> bool:
    class Remat(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(W)

        @nnx.remat
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w

    model = mpjax.with_policy(Remat(), MIXED)
    return does_not_run(lambda: nnx.grad(lambda m: m(X).sum())(model))


def decoding_fails() -> bool:
    attention = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    model = mpjax.with_policy(attention, MIXED)

    def decode() -> None:
        model.init_cache((2, 3, 8))
        model(jnp.ones((2, 1, 8)))

    return does_not_run(decode)


def bridged_module_fails() -> bool:
    model = mpjax.with_policy(nnx.bridge.to_linen(nnx.Linear, 8, 8), MIXED)
    return does_not_run(lambda: model.init(jax.random.key(0), X))


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.embed = nnx.Embed(11, 8, rngs=nnx.Rngs(0))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed(tokens) @ self.embed.embedding.T


def tied_weights_stay_in_float32() -> bool:
    return nnx_share(mpjax.with_policy(Tied(), MIXED), jnp.zeros((2, 3), int)) < 1


def batches_are_warned_of() -> bool:
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
    Fault(
        "variables with a read transform are transformed twice",
        {"mpjax": transformed_twice, "jmp": jmp_transforms_twice},
    ),
    Fault(
        "parameters of a norm with an unusual name are stored in half (Apex's O2)",
        {"mpjax": norm_parameters_are_half, "Keras 3": keras_norm_parameters_are_half},
    ),
    Fault(
        "a layer's default dtype keeps it in float32 without a word",
        {
            "mpjax": functools.partial(explicit_dtypes_win_silently, lambda m: mpjax.with_policy(m, MIXED).apply),
            **{
                name: functools.partial(explicit_dtypes_win_silently, functools.partial(_cast_apply, caster))
                for name, caster in CASTERS.items()
                if name != "mpjax"
            },
        },
    ),
    Fault("parts of a bound model, jitted methods or later layers lose the policy", {"mpjax": parts_lose_the_policy}),
    Fault("an NNX method under remat fails", {"mpjax": rematerialised_method_fails}),
    Fault("decoding with an NNX attention's cache fails", {"mpjax": decoding_fails}),
    Fault("an NNX module in a Linen model fails", {"mpjax": bridged_module_fails}),
    Fault("weights tied by hand are read in float32", {"mpjax": tied_weights_stay_in_float32}),
    Fault("casting a batch warns at every call", {"mpjax": batches_are_warned_of}),
    Fault("NNX modules have no names in reports", {"mpjax": nnx_modules_have_no_names}),
]
