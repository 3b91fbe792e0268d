"""Matmuls of operands in MXFP8: float8 elements, and a power of two for each 32 of them along the contraction.

The matmul is one bilinear primitive of operands as they are stored (a parameter in float32, an activation in half): it
quantises both along the dimensions that it contracts, so its gradients, which contract others, quantise again:

    out = dot(mx(a), mx(b)) → half      grad a = dot(mx(ct), mx(b))      grad b = dot(mx(a), mx(ct))

The derivative passes through the quantisation as if it were the identity. Elements and cotangents are float8_e4m3fn.
Scales are rounded up, so the largest element of a block is not clipped. The gradient of a float32 parameter leaves its
matmul in float32.

GPUs of compute capability 10 multiply blocks themselves (`block_dot`). Any other device, and
a mesh with explicit axes, gets the same numbers, widened: an element times a power of two is exact in bfloat16.

Source: "OCP Microscaling Formats (MX)", 2023; scales that are rounded up and e4m3 for cotangents: Mishra et al.,
"Recipes for Pre-training LLMs with MXFP8", 2025 (arXiv:2506.08027).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from mpjax.kernels import weight_gradients
from mpjax.kernels.block_dot import block_dot
from mpjax.kernels.derivatives import define, set_derivative, total
from mpjax.kernels.weight_gradients import dims_of, in_half_of
from mpjax.program import compat
from mpjax.program.formats import E4M3, multiplies_blocks

BLOCK = 32
_LEAST = np.float32(2.0**-126)  # the least normal float32

matmul = Primitive("mxfp8_matmul")
vars(matmul)["in_float32"] = lambda a, b, **params: lax.dot_general(a, b, **dims_of(params))


class Operand(NamedTuple):
    """An operand of a matmul in MXFP8.

    Args:
        x: The array as it is stored.
        dtype: The dtype of its elements.
    """

    x: Any
    dtype: np.dtype


def operand(x: Any, dtype: np.dtype, axes: tuple[str, ...] = ()) -> Operand:
    """An array as an operand; it is quantised by each matmul that reads it."""
    return Operand(x, dtype)


def multiply(
    params: dict[str, Any],
    operands: Sequence[Operand],
    half: np.dtype,
    *,
    cotangents: np.dtype = E4M3,
    half_gradients: bool = False,
    **of_tensors: Any,
) -> Any:
    """The matmul of two operands.

    Args:
        params: The parameters of a `dot_general`.
        operands: Its operands.
        half: The dtype of its result.
        cotangents: The float8 dtype of cotangents.
        half_gradients: Whether the gradients of float32 parameters are computed from half operands.
        of_tensors: What only scales of whole tensors depend on (`scaled_matmul.matmul`).
    """
    dims = dims_of(params)
    a, b = (compat.vary_like(q.x, [p.x])[0] for p, q in (operands, operands[::-1]))
    options = {"half": half, "cotangents": cotangents, "half_gradients": half_gradients}
    native = multiplies_blocks(compat.device()) and not compat.is_explicit(jax.typeof(a))
    return matmul.bind(a, b, dtypes=tuple(x.dtype for x in operands), result=half, native=native, **options, **dims)


def quantised(x: Any, dtype: np.dtype, axis: int = -1, in_rows: bool = False) -> tuple[Any, Any]:
    """Elements and scales of an array along an axis, which is padded with zeros to whole blocks.

    Args:
        x: Any floats, shape (..., n, ...).
        dtype: The dtype of the elements.
        axis: The axis.
        in_rows: Whether maxima lie as the array does. XLA would transpose all of the array to read them in the order of
            transposed scales.

    Returns:
        Elements of shape (..., m, ...), where m is the next multiple of 32, and float32 powers of two of shape
        (..., m/32, ...). Those of a block that holds a number that is not finite are NaN.

    Example:
        >>> elements, scales = quantised(jnp.array([[3.0] * 32 + [1000.0, 1.0]]), E4M3)
        >>> elements.shape, scales.tolist()
        ((1, 64), [[0.0078125, 4.0]])
    """
    axis %= x.ndim
    odd = -x.shape[axis] % BLOCK
    x = jnp.pad(x, [(0, odd if d == axis else 0) for d in range(x.ndim)]) if odd else x
    blocks = x.reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
    largest = jnp.max(jnp.abs(blocks), axis=axis + 1)
    if in_rows:
        largest = with_layout_constraint(largest, Layout(tuple(range(largest.ndim))))
    largest = largest.astype(np.float32)
    # Rounds up: half of a step more, before rounding to the nearest power of two.
    scales = lax.reduce_precision(largest * np.float32(1.4999 / float(compat.finfo(dtype).max)), 8, 0)
    scales = jnp.where(jnp.isfinite(largest), jnp.maximum(scales, _LEAST), np.float32(np.nan))
    elements = blocks.astype(np.float32) / jnp.expand_dims(scales, axis + 1)
    return elements.astype(dtype).reshape(x.shape), scales


def _impl(
    a: Any, b: Any, *, dtypes: Sequence[np.dtype], result: np.dtype, native: bool, in_rows: bool = False, **params: Any
) -> Any:
    numbers = params["dimension_numbers"]
    sides = [_Side.of(*each) for each in zip((a, b), dtypes, *numbers, strict=True)]
    if native:
        (q, of_q), (p, of_p) = (side.matrices(in_rows) for side in sides)
        out = block_dot(q, p, of_q, of_p, result)
        return out.reshape(*(a.shape[d] for d in numbers[1][0]), *(n for side in sides for n in side.free))
    wide = [side.widened(params["half"]) for side in sides]
    if compat.contracts_rows(params["half"]):
        wide = [x.astype(np.float32) for x in wide]
    accumulated = np.promote_types(result, wide[0].dtype)
    return lax.dot_general(wide[0], wide[1], **dims_of(params), preferred_element_type=accumulated).astype(result)


class _Side(NamedTuple):
    """An operand with its contracted dimensions merged into one.

    Args:
        x: The array.
        dtype: The dtype of its elements.
        axis: The contracted axis.
        batch: The batch axes.
        moved: The dimensions of the operand in the order in which they were merged.
        shape: The shape of the operand.
    """

    x: Any
    dtype: np.dtype
    axis: int
    batch: tuple[int, ...]
    moved: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, dtype: np.dtype, contracted: Sequence[int], batch: Sequence[int]) -> _Side:
        x = compat.gathered(x, contracted, BLOCK)
        others = [d for d in range(x.ndim) if d not in contracted]
        axis = sum(d < contracted[0] for d in others)
        moved = *others[:axis], *contracted, *others[axis:]
        before, after = ([x.shape[d] for d in part] for part in (others[:axis], others[axis:]))
        merged = lax.transpose(x, moved).reshape(*before, -1, *after)
        place = {d: i + (i >= axis) for i, d in enumerate(others)}
        return cls(merged, dtype, axis, tuple(place[d] for d in batch), moved, x.shape)

    @property
    def _others(self) -> list[int]:
        return [d for d in range(self.x.ndim) if d not in (self.axis, *self.batch)]

    @property
    def free(self) -> list[int]:
        """The sizes of the free dimensions."""
        return [self.x.shape[d] for d in self._others]

    def matrices(self, in_rows: bool) -> list[Any]:
        """Elements and scales, each of shape (batch, free, contracted).

        They are quantised as they lie, and then transposed, which moves one byte for each element.
        """
        shape = math.prod(self.x.shape[d] for d in self.batch), math.prod(self.free), -1
        pair = quantised(self.x, self.dtype, self.axis, in_rows)
        return [lax.transpose(y, (*self.batch, *self._others, self.axis)).reshape(shape) for y in pair]

    def widened(self, half: np.dtype) -> Any:
        """The operand, rounded to MXFP8."""
        elements, scales = quantised(self.x, self.dtype, self.axis)
        next_axis = self.axis + 1
        blocks = elements.astype(half).reshape(*scales.shape[:next_axis], BLOCK, *scales.shape[next_axis:])
        wide = (blocks * jnp.expand_dims(scales, next_axis).astype(half)).reshape(elements.shape)
        wide = lax.slice_in_dim(wide, 0, self.x.shape[self.axis], axis=self.axis)
        return lax.transpose(wide.reshape([self.shape[d] for d in self.moved]), np.argsort(self.moved))


def _elsewhere(*operands: Any, **params: Any) -> Any:
    return _impl(*operands, **{**params, "native": False})


def _lower_for_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    in_rows = params["native"] and compat.constrains_layouts(ctx)
    return mlir.lower_fun(_impl, multiple_results=False)(ctx, *operands, in_rows=in_rows, **params)


def _abstract_eval(a: Any, b: Any, **params: Any) -> Any:
    of_dot = {**dims_of(params), "precision": None, "preferred_element_type": params["result"]}
    return compat.abstract_eval_in(lax.dot_general_p, params["half"], (a, b), of_dot)


def _tangent(primals: Sequence[Any], tangents: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
    pairs = zip(((tangents[0], primals[1]), (primals[0], tangents[1])), tangents, strict=True)
    return total([matmul.bind(*pair, **params) for pair, t in pairs if type(t) is not ad.Zero], out)


def _transpose(ct: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    if type(ct) is ad.Zero:
        return [None, None]
    which = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval, other = operands[which].aval, operands[1 - which]
    if params["half_gradients"] and aval.dtype == np.float32:
        gradient = ad.primitive_transposes[weight_gradients.tangent](ct, *operands, **in_half_of(params))[which]
    else:
        gradient = _gradient(which, ct, other, aval, params)
    return [gradient if i == which else None for i in (0, 1)]


def _gradient(which: int, ct: Any, other: Any, aval: Any, params: dict[str, Any]) -> Any:
    """The cotangent of an operand, as a matmul of the result's cotangent and the other operand."""
    of_half = {**dims_of(params), "precision": None, "preferred_element_type": params["half"]}
    known = [x if i != which else ad.UndefinedPrimal(aval) for i, x in enumerate((other, other))]
    known[1 - which] = other.astype(params["half"])
    sharding = compat.explicit_cotangent_sharding(lax.dot_general_p, ct.astype(params["half"]), known, which, of_half)

    def dot(x: Any, y: Any, numbers: Any, **options: Any) -> Any:
        dtypes = tuple(params["cotangents"] if z is ct else params["dtypes"][1 - which] for z in (x, y))
        dims = {"dimension_numbers": numbers, "out_sharding": options["out_sharding"]}
        return matmul.bind(x, y, **{**params, **dims, "dtypes": dtypes, "result": aval.dtype})

    return compat.with_weak_type(weight_gradients.dot_gradient(which, other, ct, aval, of_half, sharding, dot), aval)


def _batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    if params["out_sharding"] is not None:  # In half: the sharding is that of one example.
        return jax.vmap(functools.partial(weight_gradients.tangent.bind, **in_half_of(params)), tuple(dims))(*args), 0
    pair, params, dim, _ = weight_gradients.batched_dot(args, dims[0], dims[1], params)
    return matmul.bind(*pair, **params), dim


define(matmul, _elsewhere, _abstract_eval, _batch)
mlir.register_lowering(matmul, _lower_for_cuda, platform="cuda")
compat.lowers_for_devices(matmul)
set_derivative(matmul, _tangent, (0, 1), _transpose)
