"""What the tests measure on a traced program, independent of the code under test."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MATMULS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
HALF = {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation of a program, how often it runs, and where it stands."""

    eqn: Any
    times: int
    path: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def in_dtypes(self) -> tuple[np.dtype, ...]:
        return tuple(v.aval.dtype for v in self.eqn.invars if hasattr(v.aval, "dtype"))

    @property
    def flops(self) -> int:
        return self.times * matmul_flops(self.eqn)


def equations(jaxpr: Any, times: int = 1, path: tuple[str, ...] = ()) -> Iterator[Equation]:
    """Every equation of a jaxpr and of all jaxprs inside it; a scan's body counts `length` times."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield Equation(eqn, times, path)
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                    yield from equations(part, inner, (*path, eqn.primitive.name))


def matmul_flops(eqn: Any) -> int:
    """FLOPs of one matmul or convolution (a multiply and an add count two); 0 for anything else."""
    if eqn.primitive.name not in MATMULS:
        return 0
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(lhs.shape[d] for d in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        features = rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out * math.prod(rhs.shape) // max(features, 1)
    return 2 * math.prod(lhs.shape) * rhs.shape[-1]


def matmuls(fun: Any, *args: Any) -> list[Equation]:
    """The matmuls and convolutions on real floats of a function's jaxpr, all levels deep."""
    found = equations(jax.make_jaxpr(fun)(*args))
    return [e for e in found if e.name in MATMULS and all(jnp.issubdtype(d, jnp.floating) for d in e.in_dtypes)]


def half_share(fun: Any, *args: Any) -> float:
    """The share of matmul and convolution FLOPs whose operands are all float16 or bfloat16."""
    found = matmuls(fun, *args)
    assert found, "the program has no matmul or convolution: the share would say nothing"
    total = sum(e.flops for e in found)
    return sum(e.flops for e in found if set(e.in_dtypes) <= HALF) / total


def relative_error(tree: Any, reference: Any) -> float:
    """The norm of the difference of two trees over the norm of the reference, in float64."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    difference = sum(float(np.sum((a - b) ** 2)) for a, b in pairs)
    return math.sqrt(difference / sum(float(np.sum(b**2)) for _, b in pairs))


def rounding_error(fun: Any, params: Any, inputs: Any, half: Any) -> float:
    """How far `fun(params, inputs)`'s gradients move when params and inputs are merely rounded to half."""

    def rounded(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(half).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    reference = jax.grad(fun)(params, inputs)
    return relative_error(jax.grad(fun)(rounded(params), rounded(inputs)), reference)
