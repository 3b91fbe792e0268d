"""Defines primitives with one result: what they compute, how they are batched, and their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.interpreters import ad, batching, mlir

from mpjax.program import compat


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
