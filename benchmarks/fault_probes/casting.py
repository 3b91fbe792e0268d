"""Faults of casting: operations that a tool leaves in float32 or promotes back to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np

import mpjax
from testing.measures import equations, half_share

from .fault import Fault, Probe

Function = Callable[..., Any]
W = jnp.ones((8, 8))


def _with_jmp(fun: Function) -> Function:
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    return lambda *args: policy.cast_to_output(fun(*policy.cast_to_compute(args)))


def _with_mpx(fun: Function) -> Function:
    import mpx

    return mpx.cast_function(fun, jnp.float16, jnp.float32)


def _with_jaxamp(fun: Function) -> Function:
    import jaxamp

    return jaxamp.amp(fun)


CASTERS: dict[str, Callable[[Function], Function]] = {
    "mpjax": lambda fun: mpjax.autocast(fun, "mixed_float16"),
    "jmp": _with_jmp,
    "mixed-precision-for-JAX": _with_mpx,
    "jaxamp": _with_jaxamp,
}


@jax.custom_jvp
def _custom(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


@_custom.defjvp
def _custom_rule(primals: Any, tangents: Any) -> Any:
    (w, x), (dw, dx) = primals, tangents
    return x @ w, dx @ w + x @ dw


# Each is a matmul inside a higher-order primitive.
NESTED_MATMULS: dict[str, Function] = {
    "jit": lambda w, x: jax.jit(jnp.matmul)(x, w),
    "scan": lambda w, x: jax.lax.scan(lambda y, _: (y @ w, None), x, None, length=2)[0],
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: w @ x),
    "remat": lambda w, x: jax.checkpoint(jnp.matmul)(x, w),
    "a custom derivative": _custom,
}


def over_casters(probe: Callable[[Callable[[Function], Function]], bool]) -> dict[str, Probe]:
    """The probe for every tool that casts a function."""
    return {name: functools.partial(probe, caster) for name, caster in CASTERS.items()}


def left_in_float32(kind: str, caster: Callable[[Function], Function]) -> bool:
    return half_share(caster(NESTED_MATMULS[kind]), W, W) < 1


def products_run_in_float32(caster: Callable[[Function], Function]) -> bool:
    """Between two matmuls: a product of their results, and a sum with a quotient."""

    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        y, z = x @ w, w @ x
        return (y * z + y / (2 + z)) @ w

    found = [e for e in equations(jax.make_jaxpr(caster(fun))(W, W)) if e.name in ("mul", "add")]
    assert len(found) >= 3, "the program has a product and two sums"
    return any(np.dtype("float32") in e.in_dtypes for e in found)


def does_not_run(caster: Callable[[Function], Function]) -> bool:
    """A matmul, and its gradient."""
    try:
        loss = caster(lambda w, x: jnp.sum(x @ w))
        return not np.isfinite(jax.jit(jax.grad(lambda w, x: loss(w, x).astype(jnp.float32)))(W, W)).all()
    except ModuleNotFoundError:
        raise
    except Exception:
        return True


def _model(dtype: Any = None) -> nn.Module:
    return nn.Sequential([nn.Dense(8, dtype=dtype), nn.LayerNorm(), nn.Dense(8, dtype=dtype)])


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
    Fault("does not run on this JAX", over_casters(does_not_run)),
    *(
        Fault(f"a matmul inside {kind} stays in float32", over_casters(functools.partial(left_in_float32, kind)))
        for kind in NESTED_MATMULS
    ),
    Fault("products run in float32, or quotients put what follows into it", over_casters(products_run_in_float32)),
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
