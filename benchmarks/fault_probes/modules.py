"""Faults of policies on modules: a layer that silently loses its policy or keeps another one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from flax import nnx

import mpjax
from testing.measures import half_share

from .casting import over_casters
from .fault import Fault

X = jnp.ones((2, 8))
KEY = jax.random.key(0)


def _warns(fun: Callable[[], Any]) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fun()
    return any("dtype" in str(warning.message) for warning in caught)


class _LaterLayer(nnx.Module):
    def __init__(self, dtype: Any = None) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, dtype=dtype, rngs=nnx.Rngs(0))])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def _later_layer_is_float32(model: Any) -> bool:
    model.layers.append(nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
    return half_share(model, X) < 1


def _normalised(**options: Any) -> nn.Module:
    return nn.Sequential([nn.Dense(8, **options), nn.LayerNorm()])


def _rounds_norms(model: nn.Module, cast: Callable[[Any], Any] = lambda variables: variables) -> bool:
    variables = jax.eval_shape(lambda key: cast(model.init(key, X)), KEY)
    return variables["params"]["layers_1"]["scale"].dtype != jnp.float32


def jmp_o2_rounds_norms() -> bool:
    policy = jmp.get_policy("params=float16,compute=float16,output=float32")
    return _rounds_norms(_normalised(), policy.cast_to_param)


class _Explicit(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(8, dtype=jnp.float32)(x)


def mpjax_is_silent_about_explicit_dtypes() -> bool:
    model = mpjax.with_policy(_Explicit(), "mixed_float16")
    return not _warns(lambda: jax.eval_shape(model.init, KEY, X))


def is_silent_about_explicit_dtypes(caster: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    variables, shares = jax.eval_shape(_Explicit().init, KEY, X), []
    warned = _warns(lambda: shares.append(half_share(caster(_Explicit().apply), variables, X)))
    return shares[0] < 1 and not warned


def keras_is_silent_about_explicit_dtypes() -> bool:
    import keras

    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.layers.Dense(8, dtype="float32")])
        return not _warns(lambda: model(np.ones((2, 8))))
    finally:
        keras.mixed_precision.set_dtype_policy(before)


FAULTS = [
    Fault(
        "a layer added to a half model computes in float32",
        {
            "mpjax": lambda: _later_layer_is_float32(mpjax.with_policy(_LaterLayer(), "mixed_float16")),
            "Flax": lambda: _later_layer_is_float32(_LaterLayer(dtype=jnp.float16)),
        },
    ),
    Fault(
        "half parameters include those of a norm whose name does not say so",
        {
            "mpjax": lambda: _rounds_norms(mpjax.with_policy(_normalised(), "O2")),
            "Flax": lambda: _rounds_norms(_normalised(param_dtype=jnp.float16)),
            "jmp": jmp_o2_rounds_norms,
        },
    ),
    Fault(
        "a layer's explicit float32 dtype keeps it out of the policy without a word",
        over_casters(is_silent_about_explicit_dtypes)
        | {"mpjax": mpjax_is_silent_about_explicit_dtypes, "Keras 3": keras_is_silent_about_explicit_dtypes},
    ),
]
