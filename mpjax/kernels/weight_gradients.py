"""Matmuls that output their weight gradients in float32, straight from the Tensor Core's accumulator.

JAX's derivative of `dot(x, half(w))` computes the gradient of `half(w)` in half and widens it afterwards. That gradient
can underflow or overflow, and data parallelism sums it in half. This module gives a matmul of half operands its own
derivative

    out     = dot(half(x), half(w))
    d out   = dot(half(dx), half(w)) + dot(half(x), half(dw))
    grad w  = dot(half(x), d out) → float32      grad x = dot(d out, half(w)) → half

with respect to the float32 parameter `w` itself, so the backward pass also reads `w` and not a stored half copy. The
derivative consists of three primitives, so that every transformation works on it: `detached` is the identity without a
derivative, `result` is the identity on `out` with the derivative above, and `tangent` is the matmul of that derivative.

If one trace contains both passes (a `jit` around `grad`), the backward pass reads the half copy of the forward pass.
XLA partitions a program before it merges equal casts, and would gather a sharded parameter once for each cast. The
passes over a loop are two loops. A parameter that all iterations read is cast before them, and both read that copy.

cuDNN has no such kernel for a convolution: with a float32 result, XLA casts its operands to float32, which keeps it off
the half Tensor Cores. So unless `Rules(weight_gradients="everywhere")` is set, the convolution outputs the gradient of
its kernel in half (`wide=False`), and it is cast afterwards. A convolution that is a matmul (1×1, without stride) is an
exception. The backward pass reads the float32 kernel in either case.

Source: the float32 accumulation and output of Tensor Cores, Micikevicius et al., "Mixed Precision Training", ICLR 2018.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from mpjax.kernels import staging
from mpjax.kernels.derivatives import define, set_derivative, set_identity, set_linear, set_no_derivative, total
from mpjax.program import compat

# By name: JAX's transpose rule of a ragged matmul needs a cotangent of another form.

detached = Primitive("detached")
result = Primitive("matmul_result")
tangent = Primitive("matmul_tangent")
straight_through = Primitive("straight_through")
aligned = Primitive("aligned")
rounded_cotangent = Primitive("rounded_cotangent")


def is_pointwise(params: dict[str, Any], kernel: Sequence[int]) -> bool:
    """Whether a convolution with a kernel of this shape multiplies every pixel by one matrix."""
    spatial = params["dimension_numbers"].rhs_spec[2:]
    ones = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    groups = params["feature_group_count"] * params["batch_group_count"]
    plain = groups == 1 and all(n == 1 for n in ones) and not any(map(any, params["padding"]))
    return plain and all(kernel[d] == 1 for d in spatial)


def matmul(
    primitive: Any,
    params: dict[str, Any],
    halves: Sequence[Any],
    operands: Sequence[Any],
    wide: bool,
    avals: Sequence[Any] | None = None,
    in_loop: Sequence[bool] = (False, False),
) -> Any:
    """Binds a matmul or convolution of half operands.

    Args:
        primitive: `dot_general`, `conv_general_dilated` or `ragged_dot_general`.
        params: Its parameters.
        halves: Its arrays, in half.
        operands: Its two operands as they are stored: a parameter in float32, an activation in half.
        wide: Whether it outputs the gradient of a parameter in float32.
        avals: The abstract value of its result, if known.
        in_loop: For each operand, whether it is the same in all iterations of a loop around it. The backward loop then
            reads the half copy that was made before the loop, rather than casting the parameter in each iteration.

    Returns:
        Its result, in half, or in the dtype that its parameters prefer; its cotangent is half in any case.
    """
    if compat.under_jet():
        return primitive.bind(*halves, **params)
    rest = halves[2:]
    factors = [
        staging.bind(detached, (h,) if h is x else (h, x), {"in_loop": invariant}, [jax.typeof(h)])
        for h, x, invariant in zip(halves, operands, in_loop, strict=False)
    ]
    out = staging.bind(primitive, [*factors, *rest], params, avals)
    of_result = {**params, "matmul": primitive, "half": np.dtype(halves[0].dtype), "wide": wide}
    return staging.bind(result, [out, *compat.vary_like(out, operands), *rest], of_result, [jax.typeof(out)])


def half_move(primitive: Any, params: dict[str, Any], operands: Sequence[Any], half: np.dtype) -> tuple[Any, Any]:
    """Moves a parameter or an activation in half; the derivative is a sum, in float32.

    Args:
        primitive: `all_gather` or another primitive that sends elements, or `gather`.
        params: Its parameters.
        operands: The parameter, float32, or the activation, half, and the indices, if any.
        half: The half dtype.

    Returns:
        The result in half, and the same widened to float32.
    """

    def move(x: Any, *indices: Any) -> tuple[Any, Any]:
        low = primitive.bind(x if x.dtype == half else staging.cast(x, half), *indices, **params)
        return low, lax.convert_element_type(low, np.float32)

    def move_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
        full = primitive.bind(lax.convert_element_type(tangents[0], np.float32), *primals[1:], **params)
        return move(*primals), (lax.convert_element_type(full, half), full)

    fun = jax.custom_jvp(move)
    fun.defjvp(move_jvp)
    return fun(*operands)


def dims_of(params: dict[str, Any]) -> dict[str, Any]:
    """The dimensions of a `dot_general`, of its own parameters or of those of a matmul in float8."""
    return {name: params.get(name) for name in ("dimension_numbers", "out_sharding")}


def in_half_of(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of `tangent` for the derivative in half of a matmul in float8."""
    half = np.dtype(np.float32) if compat.contracts_rows(params["half"]) else params["half"]
    matmul = {"matmul": lax.dot_general_p, "half": half, "wide": True}
    return {**dims_of(params), "precision": None, "preferred_element_type": params["half"], **matmul}


def _apply(a: Any, b: Any, *rest: Any, matmul: Any, half: np.dtype, wide: bool, **params: Any) -> Any:
    return matmul.bind(_cast(a, half), _cast(b, half), *rest, **params)


def _tangent_abstract_eval(*avals: Any, matmul: Any, half: np.dtype, wide: bool, **params: Any) -> Any:
    return compat.abstract_eval_in(matmul, half, avals, params)


def _cast(x: Any, half: np.dtype) -> Any:
    return x if x.dtype == half else lax.convert_element_type(x, half)


# The half and float8 copies of parameters in the current traces: each tracer and its copy, by id and dtype. A cache: a
# copy that is not found is cast again from the same array, to the same bits.
_copies: dict[tuple[int, np.dtype], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
_copies_in_loops: dict[tuple[int, np.dtype], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def remember_copy(low: Any, full: Any, copies: Any = _copies) -> None:
    """Remembers that a tracer is the copy of another one in a lower precision."""
    if isinstance(low, jax.core.Tracer) and isinstance(full, jax.core.Tracer):
        key = id(full), low.dtype
        copies[key] = weakref.ref(full, lambda _: copies.pop(key, None)), weakref.ref(low)


def copy_of(x: Any, dtype: Any, copies: Any = _copies) -> Any:
    """The copy of a tracer that the forward pass made in the same trace; None if there is none."""
    full, low = (reference() for reference in copies.get((id(x), np.dtype(dtype)), (lambda: None,) * 2))
    return low if full is x and low is not None and compat.same_trace(low, x) else None


def _note_copy(out: Any, low: Any, *full: Any, in_loop: bool = False) -> None:
    for x in full:
        remember_copy(low, x)
        if in_loop:
            remember_copy(low, x, _copies_in_loops)


def _half_copy(x: Any, half: np.dtype) -> Any:
    """An operand in half: the copy from the forward pass in the same trace if there is one, else a cast."""
    low = None if x.dtype == half else copy_of(x, half)
    return _cast(x, half) if low is None else low


def _loop_copy(x: Any, half: np.dtype) -> Any:
    """The half copy of an operand that a loop does not change, with its derivative; any other operand unchanged."""
    low = copy_of(x, half, _copies_in_loops)
    return x if low is None else straight_through.bind(low, x)


def _tangent_of_result(primals: Sequence[Any], tangents: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
    half = params["half"]
    if out.dtype == half:
        return _tangent_of(primals[1:], tangents[1:], out, params)
    found = _tangent_of(primals[1:], tangents[1:], out, {**params, "preferred_element_type": half})
    return compat.zero_tangent(out) if type(found) is ad.Zero else _cast(found, out.dtype)


def _tangent_of(operands: Sequence[Any], tangents: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
    """The tangent of a matmul with the result `out`."""
    (a, b, *rest), (da, db, *_) = operands, tangents
    parts = []
    if type(da) is not ad.Zero:
        parts.append(tangent.bind(da, _loop_copy(b, params["half"]), *rest, **params))
    if type(db) is not ad.Zero:
        parts.append(tangent.bind(_loop_copy(a, params["half"]), db, *rest, **params))
    return total(parts, out)


def _tangent_transpose(
    ct: Any, *operands: Any, matmul: Any, half: np.dtype, wide: bool, **params: Any
) -> Sequence[Any]:
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    ct = _cast(ct, half)  # float32 where the tangent is, as in `mpjax.kernels.softmax`
    which = 0 if ad.is_undefined_primal(operands[0]) else 1
    aval = operands[which].aval
    factors = [x if ad.is_undefined_primal(x) else _half_copy(x, half) for x in operands[:2]]
    factors += operands[2:]
    gradient = None
    if aval.dtype == np.float32 and wide:
        params["preferred_element_type"] = aval.dtype
        gradient = _gradient_of(matmul, which, half, aval, params)
    if gradient is None:
        transposed = compat.bilinear_transpose(matmul, ct, factors, which, params)
    else:
        sharding = compat.explicit_cotangent_sharding(matmul, ct, factors, which, params)
        transposed = gradient(factors[1 - which], ct, aval, params, sharding)
    if transposed.dtype != aval.dtype:
        transposed = lax.convert_element_type(transposed, aval.dtype)
    transposed = compat.with_weak_type(transposed, aval)
    return [transposed if i == which else None for i in range(len(operands))]


def _gradient_of(matmul: Any, which: int, half: Any, aval: Any, params: dict[str, Any]) -> Callable[..., Any] | None:
    """The function that computes the gradient of operand `which` in float32; None if JAX's rule serves."""
    pointwise = matmul is lax.conv_general_dilated_p and which == 1 and is_pointwise(params, aval.shape)
    if pointwise and compat.platform() != "tpu":  # There, a convolution outputs float32, and a matmul moves pixels.
        return _matrix_gradient
    if matmul is lax.dot_general_p and (which == 1 or compat.contracts_rows(half)):
        return functools.partial(dot_gradient, which)
    return None


def _matrix_gradient(images: Any, ct: Any, kernel: Any, params: dict[str, Any], sharding: Any) -> Any:
    """The gradient of the kernel of a pointwise convolution, as a matmul over all pixels."""
    lhs, rhs, out = params["dimension_numbers"]
    pixels = ((lhs[0], *lhs[2:]), (out[0], *out[2:]))
    # XLA for GPUs fuses what computes the images into this matmul, and keeps float32 values for it: a quarter more
    # memory for a ResNet-50. A convolution reads them from memory in any case.
    matrix = _dot(
        lax.optimization_barrier(images),
        ct,
        (pixels, ((), ())),
        preferred_element_type=kernel.dtype,
        out_sharding=compat.transposed(sharding, (rhs[1], rhs[0])),
    )
    return lax.expand_dims(matrix.T if rhs[0] < rhs[1] else matrix, rhs[2:])


def dot_gradient(
    which: int,
    other: Any,
    ct: Any,
    aval: Any,
    params: dict[str, Any],
    sharding: Any,
    dot: Callable[..., Any] | None = None,
) -> Any:
    """The gradient of an operand of a matmul, with its factors in the order that needs no transpose afterwards.

    JAX's rule always puts the cotangent first, which gives a transposed gradient for a kernel (inputs, outputs).

    Args:
        which: The index of the operand.
        other: The other operand.
        ct: The cotangent of the result.
        aval: The type of the gradient.
        params: The parameters of the matmul.
        sharding: The gradient's sharding on a mesh with explicit axes; None on any other mesh.
        dot: The `dot_general` to use.
    """
    dot = dot or _dot
    (contract, batch) = params["dimension_numbers"]
    (own_contract, other_contract), (own_batch, other_batch) = (
        (each[which], each[1 - which]) for each in (contract, batch)
    )
    free = tuple(d for d in range(other.ndim) if d not in (*other_contract, *other_batch))
    n = len(other_batch)
    start = n if which == 1 else ct.ndim - len(free)
    of_other, of_ct = (free, tuple(other_batch)), (tuple(range(start, start + len(free))), tuple(range(n)))
    contracted = [own for _, own in sorted(zip(other_contract, own_contract, strict=True))]
    others = [d for d in range(aval.ndim) if d not in (*own_contract, *own_batch)]
    # The order of the result's dimensions, in terms of the operand's.
    first, last = [*own_batch, *contracted, *others], [*own_batch, *others, *contracted]
    order = last if last == sorted(last) else first
    options = {name: params[name] for name in ("precision", "preferred_element_type")}
    options["out_sharding"] = compat.transposed(sharding, order)
    if order is last:
        gradient = dot(ct, other, ((of_ct[0], of_other[0]), (of_ct[1], of_other[1])), **options)
    else:
        gradient = dot(other, ct, ((of_other[0], of_ct[0]), (of_other[1], of_ct[1])), **options)
    return gradient if order == sorted(order) else lax.transpose(gradient, [order.index(d) for d in range(aval.ndim)])


def _dot(x: Any, y: Any, dimensions: Any, **options: Any) -> Any:
    """A `dot_general`, rewritten where required to multiply matrices and contract the rows of both."""
    if not compat.contracts_rows(x.dtype):
        return lax.dot_general(x, y, dimensions, **options)
    if options["out_sharding"] is not None:  # Explicit axes restrict the reshapes below.
        x, y = (lax.convert_element_type(z, options["preferred_element_type"]) for z in (x, y))
        return lax.dot_general(x, y, dimensions, **options)
    (contract, batch) = dimensions

    def matrix(z: Any, rows: Sequence[int], along: Sequence[int]) -> tuple[Any, list[int]]:
        columns = [d for d in range(z.ndim) if d not in (*rows, *along)]
        sizes = [[z.shape[d] for d in group] for group in (along, rows, columns)]
        shape = (*sizes[0], math.prod(sizes[1]), math.prod(sizes[2]))
        return lax.transpose(z, (*along, *rows, *columns)).reshape(shape), sizes[2]

    x, y = aligned.bind(x, y), aligned.bind(y, x)
    (left, of_left), (right, of_right) = (matrix(*each) for each in zip((x, y), contract, batch, strict=True))
    n = len(batch[0])
    product = lax.dot_general(left, right, (((n,), (n,)), (tuple(range(n)),) * 2), **options)
    return product.reshape(*left.shape[:n], *of_left, *of_right)


def _result_transpose(ct: Any, out: Any, *operands: Any, matmul: Any, **params: Any) -> Sequence[Any]:
    # Transposes a linear program. The linear map goes through the operands, as the derivative does. JAX also transposes
    # the matmul that made `out`, and a ragged matmul needs a cotangent for that.
    ragged = matmul.name == "ragged_dot_general"
    nothing = ad.instantiate_zeros(ad.Zero(ct.aval if type(ct) is ad.Zero else jax.typeof(ct))) if ragged else None
    ct = ct if type(ct) is ad.Zero else _cast(ct, params["half"])
    return [nothing, *_tangent_transpose(ct, *operands, matmul=matmul, **params)]


def _aligned_batch(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    (x, like), (dim, like_dim) = args, dims
    if dim is None:
        x = jnp.broadcast_to(x, (like.shape[like_dim], *x.shape))
    return aligned.bind(x if dim is None else jnp.moveaxis(x, dim, 0), like), 0


def _tangent_of_master(primals: Sequence[Any], tangents: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
    return compat.zero_tangent(out) if type(tangents[1]) is ad.Zero else _cast(tangents[1], out.dtype)


def _straight_through_transpose(ct: Any, copy: Any, master: Any) -> Sequence[Any]:
    if type(ct) is ad.Zero:
        return [None, None]
    return [None, compat.with_weak_type(_cast(ct, master.aval.dtype), master.aval)]


def _transpose_rounded(ct: Any, x: Any, *, half: np.dtype) -> Sequence[Any]:
    # Without the signs, XLA would drop the rounding as excess precision.
    return [ct if type(ct) is ad.Zero else -_cast(-_cast(ct, half), x.aval.dtype)]


def _straight_through_batch(args: Sequence[Any], dims: Sequence[Any]) -> Any:
    copy, master = args
    if dims[0] == dims[1]:
        return straight_through.bind(copy, master), dims[0]
    return _cast(master, copy.dtype), dims[1]


# Batching. A matmul or convolution stays one operation, whose weight gradient sums over the batch in float32. Where
# that is not possible, JAX's derivative is used, in half.


def _result_batch(args: Sequence[Any], dims: Sequence[Any], *, matmul: Any, half: Any, **params: Any) -> Any:
    (out, *operands), (out_dim, *dims) = args, dims
    batched = _batched(matmul, operands, dims, params) if out_dim is not None else None
    if batched is None:
        return _native(operands, dims, matmul, half, params)
    operands, params, dim, folded = batched
    out = jnp.moveaxis(out, out_dim, dim)
    out_batch = result.bind(_fold(out, dim, folded), *operands, matmul=matmul, half=half, **params)
    return out_batch.reshape(out.shape) if folded else out_batch, dim


def _tangent_batch(args: Sequence[Any], dims: Sequence[Any], *, matmul: Any, half: Any, **params: Any) -> Any:
    batched = _batched(matmul, args, dims, params)
    if batched is None:
        return _native(args, dims, matmul, half, params)
    operands, params, dim, folded = batched
    out = tangent.bind(*operands, matmul=matmul, half=half, **params)
    return _unfold(out, dim, folded) if folded else out, dim


def _native(operands: Sequence[Any], dims: Sequence[Any], matmul: Any, half: Any, params: dict[str, Any]) -> Any:
    fun = functools.partial(_apply, matmul=matmul, half=half, **params)
    return jax.vmap(fun, tuple(dims))(*operands), 0


def _batched(matmul: Any, operands: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> Any:
    """Operands, parameters, the batch dimension of the result and the size that was folded into it, if any."""
    a_dim, b_dim = dims[:2]
    if matmul is lax.dot_general_p and params.get("out_sharding") is None:
        return batched_dot(operands, a_dim, b_dim, params)
    folds = b_dim is None and a_dim is not None and params.get("batch_group_count") == 1
    if matmul is lax.conv_general_dilated_p and folds:
        return _batched_conv(operands, a_dim, params)
    return None


def batched_dot(operands: Sequence[Any], a_dim: int | None, b_dim: int | None, params: dict[str, Any]) -> Any:
    a, b = operands
    (contract, batch) = params["dimension_numbers"]
    if a_dim is not None and b_dim is not None:
        a, b = jnp.moveaxis(a, a_dim, 0), jnp.moveaxis(b, b_dim, 0)
        shifted = [tuple(d + 1 for d in side) for side in (*contract, *batch)]
        numbers = ((shifted[0], shifted[1]), ((0, *shifted[2]), (0, *shifted[3])))
        return (a, b), {**params, "dimension_numbers": numbers}, 0, 0
    sides: list[Any] = list(zip(contract, batch, strict=True))
    which, dim = (0, a_dim) if a_dim is not None else (1, b_dim)
    assert dim is not None
    sides[which] = [tuple(d + (d >= dim) for d in part) for part in sides[which]]
    taken = {d for part in sides[which] for d in part}
    free = [d for d in range((a, b)[which].ndim) if d not in taken].index(dim)
    if which == 1:
        free += a.ndim - len(contract[0]) - len(batch[0])
    numbers = ((sides[0][0], sides[1][0]), (sides[0][1], sides[1][1]))
    return (a, b), {**params, "dimension_numbers": numbers}, len(batch[0]) + free, 0


def _batched_conv(operands: Sequence[Any], dim: int, params: dict[str, Any]) -> Any:
    images, kernel = operands
    numbers = params["dimension_numbers"]
    place = numbers.lhs_spec[0]
    images = jnp.moveaxis(images, dim, place)
    size = images.shape[place]
    return (_fold(images, place, size), kernel), params, numbers.out_spec[0], size


def _fold(x: Any, dim: int, size: int) -> Any:
    """Merges a dimension with the next one; does nothing if `size` is 0."""
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :]) if size else x


def _unfold(x: Any, dim: int, size: int) -> Any:
    return x.reshape(*x.shape[:dim], size, -1, *x.shape[dim + 1 :])


# The first operand is the half copy of a parameter, the second one that parameter. Unlike `lax.stop_gradient`, it has
# no gradient in a linear program either.
set_identity(detached)
set_no_derivative(detached, _note_copy)

# The first operand is a half copy, the second one the float32 value that receives its derivative. A loop can then read
# a cast made once before it, while the gradients of all iterations are summed in float32.
set_identity(straight_through, _straight_through_batch)
set_derivative(straight_through, _tangent_of_master, (1,), _straight_through_transpose)

# The first operand is mapped by `vmap` if the second one is, over its leading dimension.
set_identity(aligned, _aligned_batch)
set_linear(aligned, lambda ct, x, like: [ct, None])

# The identity on a bias, broadcast, that is added to an activation in float32. Both cotangents are then the same half
# array, and one kernel of a GPU writes it for the activation and sums it up for the bias. Otherwise it is written in
# float32, for both.
set_identity(rounded_cotangent)
set_linear(rounded_cotangent, _transpose_rounded)

set_identity(result, _result_batch)
set_derivative(result, _tangent_of_result, (1, 2), _result_transpose)

define(tangent, _apply, _tangent_abstract_eval, _tangent_batch)
set_derivative(tangent, _tangent_of, (0, 1), _tangent_transpose)
