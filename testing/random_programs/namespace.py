"""What the source of a random program may name besides its own variables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

CONSTANT = np.array([[0.4, -0.7, 0.2], [0.9, 0.3, -0.5], [-0.1, 0.6, 0.8]], np.float32)


def dense(tangent: Any) -> Any:
    """A tangent or cotangent as an array, where a rule gets symbolic zeros."""
    return jnp.zeros(tangent.shape, tangent.dtype) if type(tangent) is SymbolicZero else tangent


def halved(tree: Any, factor: Any = 0.5) -> Any:
    """Derivatives times a factor: a rule that is wrong on purpose, so that a lost rule shows."""
    return jax.tree.map(lambda t: t * factor, tree)


def halved_jvp(fun: Callable[..., Any], symbolic_zeros: bool = False, static: bool = False) -> Callable[..., Any]:
    """A function with a `custom_jvp` rule: half of its derivative.

    Args:
        fun: the function.
        symbolic_zeros: the rule gets zeros that are no arrays.
        static: the result takes the factor as a first argument, which is not differentiated.
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
        fun: the function.
        symbolic_zeros: the rule gets zeros that are no arrays.
        static: the result takes the factor as a first argument, which is not differentiated.
        keep_vjp: the residual is what `jax.vjp` returns; else it is the arguments.
        keep_shape: residuals that are no arrays, which the backward rule computes with.
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


def strong(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results are not weakly typed, as two branches must agree."""
    return lambda *args: jax.tree.map(strong_like, fun(*args))


def strong_like(x: Any) -> Any:
    """A float32 array that is not weakly typed."""
    return lax.convert_element_type(x, jnp.float32)


def stacked(tree: Any) -> Any:
    """Results of one device, as a part of the results of all."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


def namespace() -> dict[str, Any]:
    """A fresh namespace to execute a program's source in."""
    return {
        "CHANNELS_LAST": ("NWC", "WIO", "NWC"),
        "CONSTANT": CONSTANT,
        "KEY": jax.random.key(0),
        "MESH": jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]),
        "P": P,
        "checkpoint_name": checkpoint_name,
        "halved_jvp": halved_jvp,
        "halved_vjp": halved_vjp,
        "jax": jax,
        "jnp": jnp,
        "lax": lax,
        "np": np,
        "optax": optax,
        "partial": partial,
        "stacked": stacked,
        "strong": strong,
        "strong_like": strong_like,
    }
