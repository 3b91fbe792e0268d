"""Counters on traced programs and errors of gradients, independent of the code under test."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK_SCALED = "mxfp8_matmul"
MATMULS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
FLOAT8 = {np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)}
HALF = {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}
NARROW = HALF | FLOAT8
# Operations that must not run in half, and why. The table omits tanh, logistic and erf, which are bounded activations;
# integer_pow, which is repeated multiplication; reduce_max and argmax, which are exact; and select_and_scatter_add, the
# gradient of max-pooling, which adds only a few overlapping windows.
RISKY = {
    *("exp", "exp2", "expm1", "sinh", "cosh"),  # overflow float16 from 11 on
    *("log", "log1p", "atanh", "acosh", "lgamma", "digamma"),  # lose accuracy near a zero or a pole
    *("pow", "tan", "erf_inv", "cbrt"),  # exp of log; poles
    *("reduce_sum", "reduce_prod", "add_reduce", "reduce_window_sum"),  # rounding grows with the length
    *("cumsum", "cumprod", "cumlogsumexp"),  # the same, and each prefix is kept
    *("scatter-add", "scatter_add", "scatter_mul", "scatter-mul"),  # a sum over equal indices
    *("psum", "psum_invariant", "psum2", "reduce_scatter"),  # a sum over devices
}


@dataclasses.dataclass(frozen=True)
class Equation:
    """An equation of a program, how often it runs, and its enclosing higher-order primitives."""

    eqn: Any
    times: int
    path: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of its primitive; a block-scaled matmul is a `dot_general` of operands that it quantises itself."""
        return _name(self.eqn)

    @property
    def in_dtypes(self) -> tuple[np.dtype, ...]:
        if self.eqn.primitive.name == BLOCK_SCALED:
            return tuple(self.eqn.params["dtypes"])
        return tuple(v.aval.dtype for v in self.eqn.invars if hasattr(v.aval, "dtype"))

    @property
    def flops(self) -> int:
        return self.times * matmul_flops(self.eqn)


def _name(eqn: Any) -> str:
    return "dot_general" if eqn.primitive.name == BLOCK_SCALED else eqn.primitive.name


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The sub-jaxprs that an equation runs, except the one with which a scatter combines two elements."""
    params = {**eqn.params, **getattr(eqn.params.get("_prim"), "params", {})}  # of JAX's `call_hi_primitive`
    values = (value for name, value in params.items() if name != "update_jaxpr")
    parts = (part for value in values for part in (value if isinstance(value, (tuple, list)) else (value,)))
    return [part for part in parts if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns")]


def equations(jaxpr: Any, times: int = 1, path: tuple[str, ...] = ()) -> Iterator[Equation]:
    """Every equation of a jaxpr and of all its sub-jaxprs; a scan's body counts `length` times."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield Equation(eqn, times, path)
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for part in inner_jaxprs(eqn):
            yield from equations(part, inner, (*path, eqn.primitive.name))


def matmul_flops(eqn: Any) -> int:
    """FLOPs of one matmul or convolution (a multiply-add counts two); 0 for anything else."""
    if _name(eqn) not in MATMULS:
        return 0
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if _name(eqn) == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        length = math.prod(lhs.shape[d] for d in contracted)
        return 2 * out * length if length > 1 else 0  # A product of numbers sums nothing.
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        window = math.prod(rhs.shape[d] for d in numbers.rhs_spec[2:])
        outputs, inputs = (rhs.shape[d] for d in numbers.rhs_spec[:2])
        outputs //= eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
        # A transposed convolution multiplies by inserted zeros, so count from its input if that is less. (If the batch
        # is not the leading dimension, this is JAX's gradient with respect to the weights.)
        of_inputs = math.prod(lhs.shape) * outputs if numbers.lhs_spec[0] == 0 else math.inf
        return 2 * window * int(min(out * inputs, of_inputs))
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((_, summed), (_, batch)), groups = numbers.dot_dimension_numbers, numbers.rhs_group_dimensions
    return 2 * lhs.size * math.prod(n for d, n in enumerate(rhs.shape) if d not in (*summed, *batch, *groups))


def matmuls(fun: Any, *args: Any) -> list[Equation]:
    """The matmuls and convolutions on real floats in a function's jaxpr, at all levels."""
    return matmuls_of(jax.make_jaxpr(fun)(*args))


def matmuls_of(jaxpr: Any) -> list[Equation]:
    """`matmuls` of a jaxpr."""
    found = (e for e in equations(jaxpr) if e.name in MATMULS and not is_inner_product(e.eqn))
    return [e for e in found if all(jnp.issubdtype(d, jnp.floating) for d in e.in_dtypes)]


def is_inner_product(eqn: Any) -> bool:
    """Whether a matmul only consists of inner products, or is their derivative (products without a sum)."""
    if _name(eqn) != "dot_general":
        return False
    contracted, batch = eqn.params["dimension_numbers"]
    inner = all(len(c) + len(b) == v.aval.ndim for c, b, v in zip(contracted, batch, eqn.invars, strict=True))
    return inner or not contracted[0]


def half_share(fun: Any, *args: Any) -> float:
    """The share of matmul and convolution FLOPs whose operands are all float16 or bfloat16."""
    return half_share_of(jax.make_jaxpr(fun)(*args))


def half_share_of(jaxpr: Any) -> float:
    """`half_share` of a jaxpr."""
    found = matmuls_of(jaxpr)
    assert found, "the program has no matmul or convolution, so the share is undefined"
    total = sum(e.flops for e in found)
    return sum(e.flops for e in found if set(e.in_dtypes) <= NARROW) / total


def risky_in_half(fun: Any, *args: Any) -> list[Equation]:
    """The `RISKY` equations of a function's jaxpr that take a half operand, at all levels."""
    return risky_of(jax.make_jaxpr(fun)(*args))


def risky_of(jaxpr: Any) -> list[Equation]:
    """`risky_in_half` of a jaxpr."""
    risky = (e for e in equations(jaxpr) if e.name in RISKY and NARROW & set(e.in_dtypes))
    return [e for e in risky if not _sums_single_elements(e)]


def _sums_single_elements(equation: Equation) -> bool:
    """Whether each sum of a reduction has one element: JAX drops axes of length 1 with a sum."""
    operand, result = equation.eqn.invars[0].aval, equation.eqn.outvars[0].aval
    return equation.name == "reduce_sum" and operand.size == result.size


def casts(fun: Any, *args: Any) -> int:
    """The number of executed casts between floating dtypes; a cast in a scan counts once per step."""
    return casts_of(jax.make_jaxpr(fun)(*args))


def casts_of(jaxpr: Any) -> int:
    """`casts` of a jaxpr."""

    def is_cast(eqn: Any) -> bool:
        dtypes = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        return dtypes[0] != dtypes[1] and all(jnp.issubdtype(d, jnp.floating) for d in dtypes)

    return sum(e.times for e in equations(jaxpr) if e.name == "convert_element_type" and is_cast(e.eqn))


def residual_bytes(fun: Any, *args: Any, has_aux: bool = False) -> int:
    """Bytes that the forward pass of `fun` saves for the gradient with respect to its first argument.

    These are the arrays inside the function that `jax.vjp` returns (JAX's `saved_residuals` lists them too), each
    counted once. Arguments of `fun` do not count, because they stay in memory anyway, nor do constants and broadcasts
    of a scalar constant (the zeros of relu's rule), which XLA rematerialises. A half copy of a weight counts.
    """

    vjp: Any = jax.vjp  # its type has overloads for `has_aux`

    def forward(*args: Any) -> Any:
        return vjp(lambda first: fun(first, *args[1:]), args[0], has_aux=has_aux)

    traced, shapes = jax.make_jaxpr(forward, return_shape=True)(*args)
    jaxpr: Any = getattr(traced, "jaxpr", traced)
    first, count = (len(jax.tree.leaves(tree)) for tree in shapes[:2])
    kept = jaxpr.outvars[first : first + count]
    outside = {*jaxpr.invars, *jaxpr.constvars, *_filled(jaxpr)}
    unique = {v for v in kept if not _is_literal(v)} - outside
    return sum(v.aval.size * v.aval.dtype.itemsize for v in unique)


def _is_literal(v: Any) -> bool:
    """Whether a variable is a literal of the jaxpr, which takes no memory."""
    return hasattr(v, "val")


def _filled(jaxpr: Any) -> set[Any]:
    """The arrays that are filled with one constant."""
    filled: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("broadcast_in_dim", "convert_element_type", "reshape") and all(
            _is_literal(v) or v in filled for v in eqn.invars
        ):
            filled.update(eqn.outvars)
    return filled


def relative_error(tree: Any, reference: Any) -> float:
    """The norm of the difference of two trees divided by the norm of the reference, in float64."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in leaves]
    difference = sum(float(np.sum((a - b) ** 2)) for a, b in pairs)
    return math.sqrt(difference / sum(float(np.sum(b**2)) for _, b in pairs))


def rounded(tree: Any, half: Any) -> Any:
    """The tree with floating leaves rounded to half and cast back (by NumPy: JAX would compile each shape)."""

    def one(x: Any) -> Any:
        return np.asarray(x).astype(half).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(one, tree)


def rounding_error(fun: Any, params: Any, inputs: Any, half: Any) -> float:
    """The relative change of the gradients when only the params and inputs are rounded to half."""
    reference = jax.grad(fun)(params, inputs)
    return relative_error(jax.grad(fun)(rounded(params, half), rounded(inputs, half)), reference)


def trace_time_ratio(fun: Any, reference: Any, args: tuple[Any, ...], rounds: int = 5) -> float:
    """CPU seconds to trace `fun` divided by those to trace `reference`: medians of interleaved rounds."""

    def seconds(function: Any) -> float:
        # A cached trace, even of an inner jit, would take no time.
        jax.clear_caches()
        begin = time.process_time()
        jax.make_jaxpr(lambda *args: function(*args))(*args)
        return time.process_time() - begin

    times = [(seconds(fun), seconds(reference)) for _ in range(rounds)]
    return statistics.median(t for t, _ in times) / statistics.median(t for _, t in times)
