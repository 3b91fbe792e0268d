"""Measurements of a program of the zoo under a caster: `cast(fun, policy)` returns a function like `fun`.

`mpjax.autocast` is a caster, and so are its peers. Most measurements read a trace of abstract values; only the
gradients are computed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from testing import cheap_keys, measures
from testing.random_programs.evaluate import as_arrays

from .program import COMPILE_FAST, REGISTRY, Program

Function = Callable[..., Any]
Caster = Callable[[Function, str], Function]

POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
# On the CPU, XLA's simplifier rewrites some batched bfloat16 matmuls to a form that the CPU backend accumulates in
# bfloat16. No accelerator does that, nor does the same program run eagerly.
COMPILE_TRUE = COMPILE_FAST | {"xla_disable_hlo_passes": "algsimp"}
# Loss scale, as in float16 training; a power of two does not change float32 mantissas.
LOSS_SCALE = 2.0**10
STEPS = 2


def half_of(policy: str) -> Any:
    """The half dtype of one of `POLICIES`."""
    return jnp.dtype(policy.removeprefix("mixed_"))


def identity(fun: Function, policy: str) -> Function:
    """The caster that keeps float32: the baseline."""
    return fun


def all_half(fun: Function, policy: str) -> Function:
    """The naive caster: arguments to half, results to float32, everything in between in half."""
    half = half_of(policy)

    def cast(tree: Any, source: Any, target: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(target) if jnp.asarray(x).dtype == source else x, tree)

    return lambda *args: cast(fun(*cast(args, jnp.float32, half)), half, jnp.float32)


def key() -> jax.Array:
    """The random key for building programs."""
    return cheap_keys.key(0)


@functools.cache
def _built(name: str) -> tuple[Function, Any, Any]:
    """A program's loss function, and the trace and result shapes of the function that makes params and batch."""
    program, losses = REGISTRY[name], []

    def arrays(key: jax.Array) -> tuple[Any, Any]:
        loss_fn, params, batch = program.build(key)
        losses.append(loss_fn)
        return params, batch

    with program.context():
        traced, shapes = jax.make_jaxpr(arrays, return_shape=True)(key())
    return losses[0], traced, shapes


@functools.cache
def abstract(name: str) -> tuple[Function, Any, Any]:
    """A program's loss function, and the shapes and dtypes of its params and batch."""
    loss_fn, _, shapes = _built(name)
    return loss_fn, *shapes


@functools.cache
def concrete(name: str) -> tuple[Function, Any, Any]:
    """A program's loss function, params and batch, created in NumPy, which is faster than compiling."""
    loss_fn, traced, shapes = _built(name)

    with REGISTRY[name].context():
        return loss_fn, *as_arrays(traced, shapes, [key()])


def _gradient(program: Program, loss_fn: Function) -> Function:
    """The value and gradient, as in a training step; only the value if there is no gradient."""
    return jax.value_and_grad(loss_fn, has_aux=program.has_aux) if program.differentiable else loss_fn


def _scaled_gradient(program: Program, loss_fn: Function) -> Function:
    """`_gradient` with a loss scale; the results are unscaled."""
    if not program.differentiable:
        return loss_fn

    def scaled(params: Any, batch: Any) -> Any:
        out = loss_fn(params, batch)
        loss, aux = out if program.has_aux else (out, None)
        return loss * LOSS_SCALE, aux

    def gradient(params: Any, batch: Any) -> Any:
        (loss, aux), grads = jax.value_and_grad(scaled, has_aux=True)(params, batch)
        loss, grads = jax.tree.map(lambda x: x / LOSS_SCALE, (loss, grads))
        return ((loss, aux) if program.has_aux else loss), grads

    return gradient


def _steps(program: Program, gradient: Function) -> Function:
    """Steps of gradient descent under a scan, over stacked batches."""

    def run(params: Any, batches: Any) -> Any:
        def step(params: Any, batch: Any) -> Any:
            if not program.differentiable:
                return params, gradient(params, batch)
            value, grads = gradient(params, batch)
            return jax.tree.map(lambda p, g: (p - 0.01 * g).astype(p.dtype), params, grads), value

        return jax.lax.scan(step, params, batches)

    return run


def _mean(program: Program, batched: Function) -> Function:
    """The mean loss of a vmapped loss function."""

    def mean(params: Any, batches: Any) -> Any:
        out = batched(params, batches)
        return (jnp.mean(out[0]), out[1]) if program.has_aux else jnp.mean(out)

    return mean


def _over_batches(fun: Function) -> Function:
    return jax.vmap(fun, (None, 0))


# Each maps the program, its loss function and a caster to a function of (params, batch). Transformations of a cast
# function come first, then casts of a transformed function.
TRANSFORMS: dict[str, Callable[[Program, Function, Function], Function]] = {
    "plain": lambda p, f, cast: _scaled_gradient(p, cast(f)),
    "jit": lambda p, f, cast: jax.jit(_gradient(p, cast(f))),
    "grad_of_jit": lambda p, f, cast: _gradient(p, jax.jit(cast(f))),
    "vmap": lambda p, f, cast: _over_batches(_gradient(p, cast(f))),
    "remat": lambda p, f, cast: _gradient(p, jax.checkpoint(cast(f))),
    "scan": lambda p, f, cast: _steps(p, _gradient(p, cast(f))),
    "jit_inside": lambda p, f, cast: _gradient(p, cast(jax.jit(f))),
    "vmap_inside": lambda p, f, cast: _gradient(p, _mean(p, cast(_over_batches(f)))),
    "remat_inside": lambda p, f, cast: _gradient(p, cast(jax.checkpoint(f))),
    "grad_inside": lambda p, f, cast: cast(_gradient(p, f)),
    "scan_inside": lambda p, f, cast: cast(_steps(p, _gradient(p, f))),
}
_STACKED = {"vmap", "vmap_inside", "scan", "scan_inside"}


def refused(program: Program, transform: str) -> bool:
    """Whether JAX does not support this transformation of the program."""
    return transform.removesuffix("_inside") in program.refuses


@dataclasses.dataclass(frozen=True)
class Structure:
    """Properties of the trace of a program under a transformation and a caster."""

    half_share: float
    risky: list[str]
    casts: int
    outputs: Any
    plan: int


@functools.cache
def plain(name: str, caster: Caster, dtype: str) -> tuple[Any, Any]:
    """The jaxpr of a program's loss and gradients, shared by several measurements, and the tree of its results."""
    return _traced(name, "plain", caster, dtype)


def _traced(name: str, transform: str, caster: Caster, dtype: str) -> tuple[Any, Any]:
    program, (loss_fn, params, batch) = REGISTRY[name], abstract(name)
    if transform in _STACKED:
        batch = jax.tree.map(lambda x: x.update(shape=(STEPS, *x.shape)), batch)
    fun = TRANSFORMS[transform](program, loss_fn, lambda f: caster(f, POLICIES[dtype]))
    with program.context():
        return jax.make_jaxpr(fun, return_shape=True)(params, batch)


@functools.cache
def structure(name: str, transform: str, caster: Caster, dtype: str) -> Structure:
    """Traces a program, with its gradient, under a transformation and a caster."""
    found = plain(name, caster, dtype) if transform == "plain" else _traced(name, transform, caster, dtype)
    jaxpr, outputs = found
    risky = [
        f"{'/'.join((*e.path, e.name))}{[v.aval.str_short() for v in e.eqn.invars]}" for e in measures.risky_of(jaxpr)
    ]
    return Structure(
        measures.half_share_of(jaxpr),
        risky,
        measures.casts_of(jaxpr),
        outputs,
        _plan(jaxpr, dtype),
    )


def _plan(jaxpr: Any, dtype: str) -> int:
    """A hash of the operations with the shapes and dtypes of their results, with one name for both half dtypes."""
    return hash(
        tuple(
            (e.name, *(v.aval.str_short().replace(dtype, "half") for v in e.eqn.outvars))
            for e in measures.equations(jaxpr)
            if e.name != "unscaled"  # float16 alone is marked, for a warning
        )
    )


def gradient_function(name: str, caster: Caster, dtype: str) -> tuple[Function, tuple[Any, Any]]:
    """A program's gradient under a caster, and the shapes of its arguments."""
    program, (loss_fn, params, batch) = REGISTRY[name], abstract(name)
    return _gradient(program, caster(loss_fn, POLICIES[dtype])), (params, batch)


@functools.cache
def residuals(name: str, caster: Caster, dtype: str, remat: bool = False) -> int:
    """Residual bytes of the backward pass (`measures.residual_bytes`); under `jax.checkpoint` if `remat`."""
    program, (loss_fn, params, batch) = REGISTRY[name], abstract(name)
    fun = caster(jax.checkpoint(loss_fn) if remat else loss_fn, POLICIES[dtype])
    with program.context():
        return measures.residual_bytes(fun, params, batch, has_aux=program.has_aux)


def handwritten_residuals(name: str, dtype: str) -> int:
    """`residuals` of the hand-written form for this dtype."""
    program, (_, params, batch) = REGISTRY[name], abstract(name)
    return measures.residual_bytes(program.handwritten(jnp.dtype(dtype)), params, batch, has_aux=program.has_aux)


def gradients(program: Program, loss_fn: Function, options: Any = COMPILE_FAST) -> Any:
    """The gradients with a scaled loss, as in training; the value of a program without gradients."""

    def value(params: Any, batch: Any) -> jax.Array:
        return loss_fn(params, batch)[0] if program.has_aux else loss_fn(params, batch)

    if not program.differentiable:
        return jax.jit(value, compiler_options=options)
    scaled = jax.grad(lambda params, batch: value(params, batch) * LOSS_SCALE)
    unscaled = lambda *args: jax.tree.map(lambda g: g / LOSS_SCALE, scaled(*args))
    return jax.jit(unscaled, compiler_options=options)


@functools.cache
def reference(name: str) -> tuple[Function, Any]:
    """A program's compiled gradient function in float32, and its gradients."""
    program, (loss_fn, params, batch) = REGISTRY[name], concrete(name)
    with program.context():
        compiled = gradients(program, loss_fn)
        return compiled, compiled(params, batch)


def gradient_error(name: str, caster: Caster, dtype: str, exact: Any = None) -> float:
    """The relative error of a program's compiled gradients against `exact` (default: float32); NaN if not finite."""
    program, (loss_fn, params, batch) = REGISTRY[name], concrete(name)
    options = COMPILE_TRUE if dtype == "bfloat16" else COMPILE_FAST
    with program.context():
        found = gradients(program, caster(loss_fn, POLICIES[dtype]), options)(params, batch)
    return measures.relative_error(found, reference(name)[1] if exact is None else exact)


def rounding_error(name: str, dtype: str) -> float:
    """The relative error caused by rounding only the params and the batch to half."""
    program, (_, params, batch) = REGISTRY[name], concrete(name)
    compiled, exact = reference(name)
    with program.context():
        found = compiled(measures.rounded(params, dtype), measures.rounded(batch, dtype))
    return measures.relative_error(found, exact)


def error_limit(rounding: float, dtype: str) -> float:
    """Three times the rounding error.

    Params and inputs can be nearly exact in half, but half arithmetic rounds its results too. So a rounding error
    below the unit roundoff (half the dtype's epsilon, the largest error of rounding one number) counts as the unit
    roundoff.
    """
    return 3.0 * max(rounding, float(jnp.finfo(dtype).eps) / 2)
