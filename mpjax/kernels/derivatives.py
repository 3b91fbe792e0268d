"""Defines primitives: what they compute, how they are batched, and their derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from mpjax.program import compat

Rule = Callable[..., Any]


def define(primitive: Any, fun: Rule, abstract_eval: Rule, batch: Rule | None = None, several: bool = False) -> None:
    """Defines what a primitive computes, and its batching rule.

    Args:
        primitive: The primitive.
        fun: Computes its result, or the list of its results.
        abstract_eval: The abstract values of these.
        batch: Its batching rule; by default `in_front`.
        several: Whether it has several results.
    """
    primitive.multiple_results = several
    primitive.def_impl(functools.partial(_run, primitive))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=several))
    batching.primitive_batchers[primitive] = batch or in_front(primitive)


def _run(primitive: Any, *arrays: Any, **params: Any) -> Any:
    """Runs a primitive outside of `jit`, where its platform's own form is compiled too."""
    with jax.disable_jit(False):  # Otherwise, its own `jit` would call it again.
        return _compiled(primitive, **params)(*arrays)


@functools.lru_cache(maxsize=1024)
def _compiled(primitive: Any, **params: Any) -> Rule:
    return jax.jit(functools.partial(primitive.bind, **params))


def set_identity(primitive: Any, batch: Rule | None = None, operand: int = 0) -> None:
    """Makes a primitive return one of its operands; by default, its mapped axis is that of the first."""

    def returned(*operands: Any, **_: Any) -> Any:
        return operands[operand]

    primitive.def_impl(returned)
    primitive.def_abstract_eval(returned)
    mlir.register_lowering(primitive, lambda ctx, *operands, **_: [operands[operand]])
    batching.primitive_batchers[primitive] = batch or (
        lambda args, dims, **params: (primitive.bind(*args, **params), dims[0])
    )


def in_front(primitive: Any) -> Rule:
    """The batching rule of a primitive that reads all operands with their mapped axis in front."""

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        size = mapped_size(args, dims)
        operands = (batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))
        return primitive.bind(*operands, **params), 0

    return batch


def mapped_size(args: Sequence[Any], dims: Sequence[Any]) -> int:
    """The size of a mapped axis."""
    return next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)


def set_derivative(primitive: Any, tangent_of: Rule, which: Sequence[int] | None, transpose: Rule) -> None:
    """Gives a primitive a derivative of its own.

    Args:
        primitive: A primitive with one result.
        tangent_of: `(operands, tangents, result, params) → tangent`.
        which: The indices of the operands on whose tangents this depends; None for all.
        transpose: Its transpose rule.
    """
    set_rules(
        primitive, tangent_of, lambda nonzeros, *_: any(nonzeros if which is None else (nonzeros[i] for i in which))
    )
    ad.primitive_transposes[primitive] = transpose


def total(tangents: Sequence[Any], out: Any) -> Any:
    """The sum of tangents of a result, some of which may be symbolic zeros."""
    return functools.reduce(ad.add_tangents, tangents, compat.zero_tangent(out))


def set_linear(primitive: Any, transpose: Rule) -> None:
    """Gives a primitive that is linear in its first operand its derivative: the primitive itself."""

    def tangent_of(primals: Sequence[Any], tangents: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
        first = tangents[0]
        return first if type(first) is ad.Zero else primitive.bind(first, *primals[1:], **params)

    set_derivative(primitive, tangent_of, (0,), transpose)


def set_no_derivative(primitive: Any, note: Rule = lambda out, *operands, **params: None) -> None:
    """Gives a primitive the derivative zero, in linear programs too; `note` is called where it is differentiated."""

    def noted(*primals: Any, **params: Any) -> Any:
        out = primitive.bind(*primals, **params)
        note(out, *primals, **params)
        return out

    set_rules(primitive, lambda primals, tangents, out, params: compat.zero_tangent(out), lambda *_: False, noted)
    ad.primitive_transposes[primitive] = lambda ct, *xs, **_: [None] * len(xs)


def set_rules(primitive: Any, tangent_of: Rule, has_tangent: Rule, run: Rule | None = None) -> None:
    """Gives a primitive its rules for forward mode and for linearization.

    Args:
        primitive: The primitive.
        tangent_of: `(operands, tangents, result, params) → tangent`, or tangents of several results.
        has_tangent: `(nonzeros, operands, result) → bool`, or a list, given which tangents are not zero.
        run: What to call in place of `primitive.bind`.
    """
    run = run or primitive.bind

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        out = run(*primals, **params)
        return out, tangent_of(primals, tangents, out, params)

    def linearization(nonzeros: Sequence[bool], *primals: Any, **params: Any) -> tuple[Any, Any, Rule]:
        out = run(*primals, **params)
        return out, has_tangent(nonzeros, primals, out), lambda *tangents: tangent_of(primals, tangents, out, params)

    ad.primitive_jvps[primitive] = jvp
    compat.set_linearization(primitive, linearization)


def vary_as(y: Any, arrays: Sequence[Any]) -> Any:
    """An array that varies along all axes of a `shard_map` that some arrays vary along."""
    return compat.vary(y, tuple(frozenset().union(*map(compat.varying_axes, arrays))))


def same_axes(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, which vary along the same axes of a `shard_map`."""
    return [vary_as(y, arrays) for y in arrays]
