"""Faults of casting: operations that a tool leaves in float32 or promotes back to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from benchmarks.others import with_jmp, with_mpx
from testing.measures import half_share

from .fault import Fault, Probe, does_not_run

Function = Callable[..., Any]
W = jnp.ones((8, 8))


def _with_jaxamp(fun: Function) -> Function:
    import jaxamp

    return jaxamp.amp(fun)


CASTERS: dict[str, Callable[[Function], Function]] = {
    "mpjax": lambda fun: mpjax.autocast(fun, "mixed_float16"),
    "jmp": lambda fun: with_jmp(fun, "mixed_float16"),
    "mixed-precision-for-JAX": lambda fun: with_mpx(fun, "mixed_float16"),
    "jaxamp": _with_jaxamp,
}


def over_casters(probe: Callable[[Callable[[Function], Function]], bool]) -> dict[str, Probe]:
    """The probe for every tool that casts a function."""
    return {name: functools.partial(probe, caster) for name, caster in CASTERS.items()}


def has_no_gradient(caster: Callable[[Function], Function]) -> bool:
    """A matmul, and its gradient."""

    def run() -> None:
        loss = caster(lambda w, x: jnp.sum(x @ w))
        grads = jax.jit(jax.grad(lambda w, x: loss(w, x).astype(jnp.float32)))(W, W)
        assert np.isfinite(grads).all()

    return does_not_run(run)


def _model() -> nn.Module:
    return nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(8)])


def _half_except_norms(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(jnp.float16) if p.ndim == 2 else p, params)


def flax_promotes() -> bool:
    """`dtype=None` throughout: kernels and inputs in half, the norm's parameters in float32, as advised."""
    model = _model()
    params = jax.eval_shape(lambda key: _half_except_norms(model.init(key, W)), jax.random.key(0))
    return half_share(model.apply, params, jax.ShapeDtypeStruct(W.shape, jnp.float16)) < 1


def with_policy_promotes() -> bool:
    model = _model()
    params = jax.eval_shape(model.init, jax.random.key(0), W)
    return half_share(mpjax.with_policy(model, "mixed_float16").apply, params, W) < 1


def cast_arguments_promote(caster: Callable[[Function], Function]) -> bool:
    model = _model()
    return half_share(caster(model.apply), jax.eval_shape(model.init, jax.random.key(0), W), W) < 1


def keras_promotes() -> bool:
    import os

    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    half = {"dtype": "mixed_float16"}
    layers = [keras.layers.Dense(8, **half), keras.layers.LayerNormalization(**half), keras.layers.Dense(8, **half)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    variables = [v.value for v in model.trainable_variables]
    return half_share(lambda v, x: model.stateless_call(v, [], x)[0], variables, W) < 1


FAULTS = [
    Fault("does not run on this JAX", over_casters(has_no_gradient)),
    Fault(
        "a norm with float32 parameters puts what follows back into float32",
        {
            "mpjax": with_policy_promotes,
            "Flax": flax_promotes,
            "Keras 3": keras_promotes,
            **{name: probe for name, probe in over_casters(cast_arguments_promote).items() if name != "mpjax"},
        },
    ),
]
