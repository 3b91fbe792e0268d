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


class _EncoderDecoder(nn.Module):
    dtype: Any = None

    def setup(self) -> None:
        self.encoder, self.decoder = nn.Dense(8, dtype=self.dtype), nn.Dense(8, dtype=self.dtype)

    def __call__(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


def _submodule_is_float32(model: nn.Module) -> bool:
    variables = jax.eval_shape(model.init, KEY, X)
    return half_share(nn.apply(lambda m, x: m.decoder(x), model), variables, X) == 0


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


def mpjax_o2_rounds_norms() -> bool:
    model = mpjax.with_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm()]), "O2")
    return jax.eval_shape(model.init, KEY, X)["params"]["layers_1"]["scale"].dtype != jnp.float32


def flax_o2_rounds_norms() -> bool:
    model = nn.Sequential([nn.Dense(8, param_dtype=jnp.float16), nn.LayerNorm()])
    return jax.eval_shape(model.init, KEY, X)["params"]["layers_1"]["scale"].dtype != jnp.float32


def jmp_o2_rounds_norms() -> bool:
    policy = jmp.get_policy("params=float16,compute=float16,output=float32")
    variables = nn.Sequential([nn.Dense(8), nn.LayerNorm()]).init(KEY, X)
    return policy.cast_to_param(variables)["params"]["layers_1"]["scale"].dtype != jnp.float32


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


class _Doubled(nnx.Param):
    def get_value(self, **kwargs: Any) -> Any:
        return super().get_value(**kwargs) * 2


class _UsesDoubled(nnx.Module):
    def __init__(self) -> None:
        self.w = _Doubled(jnp.ones((8, 8)))

    def __call__(self, x: Any) -> Any:
        return x @ self.w[...]


def _transforms_twice(cast: Callable[[Any], Any]) -> bool:
    return bool((nnx.jit(lambda: cast(_UsesDoubled())(X) != _UsesDoubled()(X))()).any())


def _fails_under_strict_promotion(model: nn.Module) -> bool:
    with jax.numpy_dtype_promotion("strict"):
        try:
            jax.eval_shape(model.init, KEY, X)
        except jax.errors.JAXTypeError:
            return True
        except Exception as error:
            return "promotion" in str(error)
    return False


FAULTS = [
    Fault(
        "a submodule called on its own loses the half dtype",
        {
            "mpjax": lambda: _submodule_is_float32(mpjax.with_policy(_EncoderDecoder(), "mixed_float16")),
            "Flax": lambda: _submodule_is_float32(_EncoderDecoder(dtype=jnp.float16)),
        },
    ),
    Fault(
        "a layer added to a half model computes in float32",
        {
            "mpjax": lambda: _later_layer_is_float32(mpjax.with_policy(_LaterLayer(), "mixed_float16")),
            "Flax": lambda: _later_layer_is_float32(_LaterLayer(dtype=jnp.float16)),
        },
    ),
    Fault(
        "half parameters include those of a norm whose name does not say so",
        {"mpjax": mpjax_o2_rounds_norms, "Flax": flax_o2_rounds_norms, "jmp": jmp_o2_rounds_norms},
    ),
    Fault(
        "a layer's explicit float32 dtype keeps it out of the policy without a word",
        over_casters(is_silent_about_explicit_dtypes)
        | {"mpjax": mpjax_is_silent_about_explicit_dtypes, "Keras 3": keras_is_silent_about_explicit_dtypes},
    ),
    Fault(
        "a variable that computes what it returns is transformed twice",
        {
            "mpjax": lambda: _transforms_twice(lambda model: mpjax.with_policy(model, "mixed_float16")),
            "jmp": lambda: _transforms_twice(jmp.get_policy("params=float16,compute=float16").cast_to_param),
        },
    ),
    Fault(
        "the bias add of a half layer fails under strict dtype promotion",
        {
            "mpjax": lambda: _fails_under_strict_promotion(mpjax.with_policy(nn.Dense(4), "mixed_float16")),
            "Flax": lambda: _fails_under_strict_promotion(nn.Dense(4, dtype=jnp.float16)),
        },
    ),
]
