"""The names that a random program may use in addition to its own variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import flax.linen
import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.program import compat

CONSTANT = np.array([[0.4, -0.7, 0.2], [0.9, 0.3, -0.5], [-0.1, 0.6, 0.8]], np.float32)


def dense(tangent: Any) -> Any:
    """Converts a tangent or cotangent, which may be a symbolic zero, to an array."""
    return jnp.zeros(tangent.shape, tangent.dtype) if type(tangent) is SymbolicZero else tangent


def halved(tree: Any, factor: Any = 0.5) -> Any:
    """Derivatives times a factor: a deliberately wrong rule, to detect a lost rule."""
    return jax.tree.map(lambda t: t * factor, tree)


def halved_jvp(fun: Callable[..., Any], symbolic_zeros: bool = False, static: bool = False) -> Callable[..., Any]:
    """A function with a `custom_jvp` rule: half of its derivative.

    Args:
        fun: The function.
        symbolic_zeros: The rule gets symbolic zeros instead of arrays.
        static: The result takes the factor as a first argument, which is not differentiated.
    """
    if static:
        with_factor = jax.custom_jvp(lambda factor, *args: fun(*args), nondiff_argnums=(0,))

        def static_rule(factor: Any, primals: Any, tangents: Any) -> Any:
            out, tangent = jax.jvp(fun, primals, tangents)
            return out, halved(tangent, factor)

        with_factor.defjvp(static_rule)
        return with_factor
    wrapped = jax.custom_jvp(lambda *args: fun(*args))

    def rule(primals: Any, tangents: Any) -> Any:
        out, tangent = jax.jvp(fun, primals, tuple(map(dense, tangents)))
        return out, halved(tangent)

    wrapped.defjvp(rule, symbolic_zeros=symbolic_zeros)
    return wrapped


def halved_vjp(
    fun: Callable[..., Any],
    symbolic_zeros: bool = False,
    static: bool = False,
    keep_vjp: bool = False,
    keep_shape: bool = False,
) -> Callable[..., Any]:
    """A function with a `custom_vjp` rule: half of its derivative.

    Args:
        fun: The function.
        symbolic_zeros: The rule gets symbolic zeros instead of arrays.
        static: The result takes the factor as a first argument, which is not differentiated.
        keep_vjp: The residual is the function that `jax.vjp` returns; otherwise it is the arguments.
        keep_shape: Some residuals are not arrays, and the backward rule uses them.
    """
    if static:
        with_factor = jax.custom_vjp(lambda factor, *args: fun(*args), nondiff_argnums=(0,))
        with_factor.defvjp(
            lambda factor, *args: (fun(*args), args),
            lambda factor, args, cotangent: halved(jax.vjp(fun, *args)[1](cotangent), factor),
        )
        return with_factor
    wrapped = jax.custom_vjp(lambda *args: fun(*args))

    def forward(*args: Any) -> Any:
        if symbolic_zeros:
            args = tuple(arg.value for arg in args)
        if keep_vjp:
            return jax.vjp(fun, *args)
        return fun(*args), (args, (args[0].shape, True) if keep_shape else None)

    def backward(kept: Any, cotangent: Any) -> Any:
        cotangent = jax.tree.map(dense, cotangent, is_leaf=lambda t: type(t) is SymbolicZero)
        if keep_vjp:
            return halved(kept(cotangent))
        args, extra = kept
        first, *rest = halved(jax.vjp(fun, *args)[1](cotangent))
        if extra is not None and extra[1]:
            first = jnp.broadcast_to(first, extra[0])
        return (first, *rest)

    wrapped.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
    return wrapped


@jax.custom_vjp
def int8_matmul(x: Any, w: Any) -> Any:
    """A matmul of rounded values in int8, with the gradient of the exact one."""
    rounded = (jnp.clip(jnp.round(a * 32), -127, 127).astype(jnp.int8) for a in (x, w))
    return lax.dot(*rounded, preferred_element_type=jnp.int32).astype(jnp.float32) / 1024


int8_matmul.defvjp(
    lambda x, w: (int8_matmul(x, w), (x, w)),
    lambda kept, cotangent: (cotangent @ kept[1].T, kept[0].T @ cotangent),
)


@jax.custom_batching.custom_vmap
def scaled_by_vmap_rule(x: Any) -> Any:
    """A function with a rule for `vmap`."""
    return jnp.sin(x) * 0.5


@scaled_by_vmap_rule.def_vmap
def _scaled_rule(size: int, mapped: Any, x: Any) -> Any:
    return jnp.sin(x) * 0.5, mapped[0]


# A primitive without results, as K-FAC marks losses.
_mark = Primitive("mark")
_mark.multiple_results = True
_mark.def_impl(lambda x: [])
_mark.def_abstract_eval(lambda x: [])
mlir.register_lowering(_mark, lambda context, x: [])
ad.primitive_jvps[_mark] = lambda primals, tangents: (_mark.bind(*primals), [])
batching.primitive_batchers[_mark] = lambda args, dims: (_mark.bind(*args), [])


def marked(x: Any) -> Any:
    """A value that a primitive without results reads."""
    _mark.bind(x)
    return x


def sharded(x: Any) -> Any:
    """An array split over the devices of a mesh with explicit axes; elsewhere the array itself."""
    mesh = jax.sharding.get_abstract_mesh()
    splits = mesh.explicit_axes == ("i",) and x.ndim and x.shape[0] % mesh.shape["i"] == 0
    return jax.sharding.reshard(x, P("i")) if splits else x


def replicated(x: Any) -> Any:
    """An array with all of its elements on every device of a mesh with explicit axes."""
    return jax.sharding.reshard(x, P()) if jax.sharding.get_abstract_mesh().explicit_axes else x


def flax_norm(x: Any) -> Any:
    """A Flax layer as a function."""
    layer = flax.linen.LayerNorm(epsilon=0.1)
    return layer.apply({"params": {"scale": jnp.full(3, 0.5), "bias": jnp.ones(3)}}, x)


def nearly_identity(fun: Callable[..., Any], at: Any) -> Callable[..., Any]:
    """A linear operator near the identity: the identity plus a small multiple of a function's derivative."""
    linear = jax.linearize(fun, at)[1]
    return lambda v: v + 0.1 * jnp.tanh(linear(at)).mean() * v


def solve_once(matvec: Callable[..., Any], b: Any) -> Any:
    """Solves a system with an operator near the identity in one iteration, since each iteration costs a trace."""
    return b + b - matvec(b)


def root_near(x: Any, fun: Callable[..., Any]) -> Any:
    """A root of the identity plus a bounded function, minus `x`, from one iteration."""
    # JAX can't differentiate a root that varies along more axes of a `shard_map` than its guess.
    (x,) = compat.vary_like(fun(x), [x])

    def residual(y: Any) -> Any:
        # Nor one whose function changes the dtype, as one that returns float32 for a guess that a region cast to half.
        return (y + 0.1 * jnp.tanh(fun(y)) - x).astype(x.dtype)

    return lax.custom_root(residual, x, lambda f, y: y - f(y), solve_once)


def without_autocast(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function that autocast leaves alone."""

    def wrapped(*args: Any) -> Any:
        with mpjax.autocast_disabled():
            return fun(*args)

    return wrapped


def strong(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results are not weakly typed, since branches must agree."""
    return lambda *args: jax.tree.map(strong_like, fun(*args))


def strong_like(x: Any) -> Any:
    """A float32 array that is not weakly typed."""
    return lax.convert_element_type(x, jnp.float32)


def stacked(tree: Any) -> Any:
    """The results of one device with a leading device axis."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def mesh(axis_type: jax.sharding.AxisType) -> jax.sharding.Mesh:
    """A mesh of two devices."""
    return jax.make_mesh((2,), ("i",), axis_types=(axis_type,), devices=jax.devices()[:2])


@functools.cache
def namespace(axis_type: jax.sharding.AxisType = jax.sharding.AxisType.Auto) -> dict[str, Any]:
    """The namespace of a program's source for a mesh with such an axis; each program executes in a copy."""
    return {
        "ARRAY": jnp.asarray(CONSTANT),
        "CHANNELS_LAST": ("NWC", "WIO", "NWC"),
        "CONSTANT": CONSTANT,
        "KEY": jax.random.key(0),
        "MESH": mesh(axis_type),
        "P": P,
        "checkpoint_name": checkpoint_name,
        "flax": flax,
        "flax_norm": flax_norm,
        "halved_jvp": halved_jvp,
        "halved_vjp": halved_vjp,
        "int8_matmul": int8_matmul,
        "jax": jax,
        "jnp": jnp,
        "lax": lax,
        "marked": marked,
        "mpjax": mpjax,
        "nearly_identity": nearly_identity,
        "np": np,
        "optax": optax,
        "partial": partial,
        "replicated": replicated,
        "root_near": root_near,
        "scaled_by_vmap_rule": scaled_by_vmap_rule,
        "sharded": sharded,
        "solve_once": solve_once,
        "stacked": stacked,
        "strong": strong,
        "strong_like": strong_like,
        "without_autocast": without_autocast,
    }
