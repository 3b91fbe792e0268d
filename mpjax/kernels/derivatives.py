"""Defines primitives: what they compute, how they are batched, and their derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from mpjax.program import compat
from mpjax.program.objects import filled


def set_derivative(
    primitive: Any, tangent_of: Callable[..., Any], which: Sequence[int] | None, transpose: Callable[..., Any]
) -> None:
    """Gives a primitive a derivative of its own.

    Args:
        primitive: A primitive with one result.
        tangent_of: `(operands, tangents, result, params) → tangent`.
        which: The indices of the operands on whose tangents this depends; None for all.
        transpose: Its transpose rule.
    """

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        out = primitive.bind(*primals, **params)
        return out, tangent_of(primals, tangents, out, params)

    def linearization(nonzeros: Sequence[bool], *primals: Any, **params: Any) -> tuple[Any, bool, Any]:
        out = primitive.bind(*primals, **params)
        has_tangent = any(nonzeros if which is None else (nonzeros[i] for i in which))
        return out, has_tangent, lambda *tangents: tangent_of(primals, tangents, out, params)

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearization)
    ad.primitive_transposes[primitive] = transpose


def set_no_derivative(primitive: Any, note: Callable[..., None] = lambda out, *operands, **params: None) -> None:
    """Gives a primitive the derivative zero, in linear programs too; `note` is called where it is differentiated."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        out = primitive.bind(*primals, **params)
        note(out, *primals, **params)
        return out, compat.zero_tangent(out)

    def linearization(nonzeros: Sequence[bool], *primals: Any, **params: Any) -> tuple[Any, bool, Any]:
        out, zero = jvp(primals, (), **params)
        return out, False, lambda *tangents: zero

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearization)
    ad.primitive_transposes[primitive] = lambda ct, *xs, **_: [None] * len(xs)


def define(
    primitive: Any, fun: Callable[..., Any], abstract_eval: Callable[..., Any], batch: Callable[..., Any]
) -> None:
    """Defines what a primitive with one result computes, and its batching rule."""
    primitive.def_impl(fun)
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    batching.primitive_batchers[primitive] = batch


def set_identity(primitive: Any, batch: Callable[..., Any]) -> None:
    """Makes a primitive the identity on its first operand."""
    primitive.def_impl(lambda x, *_, **__: x)
    primitive.def_abstract_eval(lambda x, *_, **__: x)
    mlir.register_lowering(primitive, lambda ctx, x, *_, **__: [x])
    batching.primitive_batchers[primitive] = batch


# Primitives with several results, whose formulas JAX differentiates (attention, losses).


def define_compiled(primitive: Any, abstract_eval: Callable[..., Any]) -> None:
    """Defines a primitive with several results that is lowered outside of `jit` too, so that its kernel runs there."""
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, **params: _compiled(primitive, **params)(*arrays))
    primitive.def_abstract_eval(abstract_eval)


@functools.lru_cache(maxsize=1024)
def _compiled(primitive: Any, **params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **params))


def derive_formulas(primitive: Any, whole: Callable[..., Any]) -> None:
    """Gives a primitive the derivative of its formulas, in forward mode; JAX transposes that one."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        inexact = [i for i, p in enumerate(primals) if compat.is_inexact(jax.typeof(p))]

        def of_floats(*floats: Any) -> Any:
            return whole(*filled(primals, inexact, floats), **params)

        _, out = jax.jvp(of_floats, [primals[i] for i in inexact], [ad.instantiate_zeros(tangents[i]) for i in inexact])
        return primitive.bind(*primals, **params), out

    ad.primitive_jvps[primitive] = jvp


def vary_as(y: Any, arrays: Sequence[Any]) -> Any:
    """An array that varies along all axes of a `shard_map` that some arrays vary along."""
    return compat.vary(y, tuple(frozenset().union(*map(compat.varying_axes, arrays))))


def same_axes(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, which vary along the same axes of a `shard_map`."""
    return [vary_as(y, arrays) for y in arrays]
