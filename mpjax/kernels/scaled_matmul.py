"""Matmuls of float8 operands with one scale for each tensor, and their derivatives.

An operand `x` is quantised with a scale that is computed on the spot, so there is no state:

    s = max|x| / 448        q = clip(x / s) in float8_e4m3fn        out = dot(qa, qb) · (sa · sb) in bfloat16

The derivative passes through the quantisation as if it were the identity. Both of its matmuls are in float8 too:

    qc, sc = quantise(d out)       grad a = dot(qc, qb) · (sc · sb)       grad b = dot(qa, qc) · (sa · sc)

with cotangents in float8_e5m2, which has more range, or in float8_e4m3fn. The gradient of a float32 parameter leaves
its matmul in float32. The backward pass keeps the float8 activation and its scale; it quantises the parameter itself
again, or reads the float8 copy of the forward pass if one trace contains both passes.

Scales are rounded up to four significant bits. The product of two then is exact in bfloat16, and XLA folds
`dot(...) · product` into cuBLASLt's float8 matmul, which takes one scale and writes bfloat16. A larger scale loses
nothing: float8 rounds relatively.

The matmul is JAX's own `dot_general` of float8 operands: compilers without float8 units widen it, exactly. Its default
precision lets Hopper accumulate in fewer bits, which is accurate enough forward, so backward passes set `HIGHEST`.

Primitives have rules of their own, so that every transformation works: `float8_scale` (one scale for a whole batch
under `vmap`), `float8_quantise` and `float8_rescale` (no derivative, in linear programs either), and `float8_result`,
the identity on `out` with the derivative above, which is `float8_tangent`. That one also takes the operands in the
precision that they are stored in. It reads them only if it is itself differentiated: second derivatives run in half
precision.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022; current scaling as in Transformer Engine and
torchao.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax.kernels import block_scaled, weight_gradients
from mpjax.kernels.derivatives import define, mapped_size, set_derivative, set_identity, set_no_derivative, total
from mpjax.kernels.weight_gradients import dims_of, in_half_of
from mpjax.program import compat
from mpjax.program.formats import E4M3, E5M2

# The least normal float32. A smaller scale would be flushed to zero.
_LEAST = 2.0**-126

scale_of = Primitive("float8_scale")
quantise = Primitive("float8_quantise")
rescale = Primitive("float8_rescale")
result = Primitive("float8_result")
tangent = Primitive("float8_tangent")
# Without rounding, a copy is the array over its scale (see `program.interpreter.bind_wide`).
vars(scale_of)["in_float32"] = scale_of.bind
vars(quantise)["in_float32"] = lambda x, scale, dtype: lax.convert_element_type(x, np.float32) / scale
vars(rescale)["in_float32"] = lambda out, scale: out * scale


class Operand(NamedTuple):
    """An operand of a float8 matmul.

    Args:
        x: The array as it is stored: a parameter in float32, or an activation in half.
        q: Its float8 copy.
        scale: The scale of that copy, float32.
        stored: Whether the backward pass has the copy anyway, because it is an input of a remat.
    """

    x: Any
    q: Any
    scale: Any
    stored: bool = False


def quantised(x: Any, dtype: np.dtype, axes: tuple[str, ...] = ()) -> Operand:
    """An array as an operand of a float8 matmul.

    Args:
        x: The array.
        dtype: The float8 dtype.
        axes: The named axes of a `shard_map` over which its scale is the same. Elsewhere, a scale is that of the whole
            array anyway.
    """
    scale = scale_of.bind(x, dtype=dtype)
    if axes and compat.in_named_axes():
        scale = lax.pmax(compat.vary(scale, axes), axes)
    x = compat.vary_like(scale, [x])[0]
    scale = compat.vary_like(x, [scale])[0]
    return Operand(x, quantise.bind(x, scale, dtype=dtype), scale)


def matmul(
    params: dict[str, Any],
    operands: Sequence[Operand],
    half: np.dtype,
    *,
    parameters: Sequence[bool],
    cotangents: np.dtype = E5M2,
    half_gradients: bool = False,
    axes: tuple[str, ...] = (),
    backward: bool = False,
) -> Any:
    """The matmul of two quantised operands.

    Args:
        params: The parameters of a `dot_general`.
        operands: Its operands.
        half: The dtype of its result.
        parameters: For each operand, whether it is a float32 parameter, whose gradient is float32.
        cotangents: The float8 dtype of cotangents.
        half_gradients: Whether the gradients of parameters are computed from half operands.
        axes: As in `quantised`.
        backward: Whether the matmul is part of a backward pass, which accumulates all bits.
    """
    dims = dims_of(params)
    (a, qa, sa, _), (b, qb, sb, _) = operands
    qa, qb = (compat.vary_like(q, [p])[0] for p, q in ((qa, qb), (qb, qa)))
    out = _scaled_dot(qa, qb, sa * sb, half, dims, _PRECISE if backward else _FAST)
    flat = compat.vary_like(out, [a, qa, sa, b, qb, sb])
    stored = tuple(operand.stored for operand in operands)
    options = {"cotangents": cotangents, "half_gradients": half_gradients, "axes": axes, "stored": stored}
    return result.bind(out, *flat, half=half, parameters=tuple(parameters), **options, **dims)


_FAST, _PRECISE = lax.Precision.DEFAULT, lax.Precision.HIGHEST


def _scaled_dot(a: Any, b: Any, scale: Any, dtype: Any, dims: dict[str, Any], precision: Any) -> Any:
    out = lax.dot_general(a, b, **dims, precision=precision, preferred_element_type=dtype)
    return rescale.bind(out, scale)


def _scale_impl(x: Any, *, dtype: np.dtype) -> Any:
    amax = jnp.max(jnp.abs(x), initial=0).astype(np.float32)
    # Rounds up: a quarter of a step more than half of one, before rounding to nearest.
    ratio = amax * (1.0667 / float(compat.finfo(dtype).max))
    scale = lax.reduce_precision(ratio, exponent_bits=8, mantissa_bits=3)
    return jnp.where(amax == 0, np.float32(1), jnp.maximum(scale, np.float32(_LEAST)))


def _quantise_impl(x: Any, scale: Any, *, dtype: np.dtype) -> Any:
    limit = np.float32(compat.finfo(dtype).max)
    return jnp.clip(x.astype(np.float32) / scale, -limit, limit).astype(dtype)


def _quantise_for_cuda(ctx: Any, x: Any, scale: Any, *, dtype: np.dtype) -> Any:
    """The copy of an array, that of a parameter in the layout of the parameter.

    Float8 matmuls of NVIDIA GPUs contract the last dimension of both operands, so the forward and the backward pass
    read transposes of each other. XLA would write one of them, and the other from it in a second kernel. With this
    layout, one kernel writes both.
    """
    is_parameter = ctx.avals_in[0].dtype == np.float32 and ctx.avals_in[0].ndim > 1
    in_rows = is_parameter and compat.constrains_layouts(ctx)

    def quantised(x: Any, scale: Any) -> Any:
        q = _quantise_impl(x, scale, dtype=dtype)
        return with_layout_constraint(q, Layout(tuple(range(q.ndim)))) if in_rows else q

    return mlir.lower_fun(quantised, multiple_results=False)(ctx, x, scale)


def _with_scale(primitive: Any) -> Any:
    """The batching rule of a primitive with an array and its scale as operands."""

    def batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        (x, scale), (dim, of_scale) = args, dims
        if of_scale is None:
            return primitive.bind(x, scale, **params), dim
        # A `cond` with a batched predicate batches all results of its branches. Then each example has its own scale.
        x = batching.bdim_at_front(x, dim, scale.shape[of_scale])
        scale = jnp.moveaxis(scale, of_scale, 0)
        scale = scale.reshape(scale.shape[0], *(scale.shape[1:] or (1,) * (x.ndim - 1)))
        return primitive.bind(x, scale, **params), 0

    return batch


# The derivative. The operands of `float8_tangent` have names: "d0" and "d1" are the tangents of the two operands, and
# "x", "q" and "s" are what it knows of the other operand. The backward pass quantises a parameter itself, so its "q" is
# stored only if it is an input of a remat. A gradient in half reads "x" only.


def _names(which: Sequence[int], params: dict[str, Any]) -> tuple[str, ...]:
    names: list[str] = []
    for i in which:
        j = 1 - i
        again = params["parameters"][j] and not params["stored"][j]
        known = ("x",) if _in_half(i, params) else ("x", "s") if again else ("x", "q", "s")
        names += (f"d{i}", *(f"{name}{j}" for name in known))
    return tuple(names)


def _in_half(i: int, params: dict[str, Any]) -> bool:
    """Whether the gradient of an operand is computed from half operands."""
    return params["half_gradients"] and params["parameters"][i]


def _of_result(operands: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("x0", "q0", "s0", "x1", "q1", "s1"), operands, strict=True))


def _tangent_of(known: dict[str, Any], tangents: dict[int, Any], out: Any, params: dict[str, Any]) -> Any:
    """The tangent of a matmul with the result `out`, given what is known of its operands and their tangents."""
    which = [i for i, d in tangents.items() if type(d) is not ad.Zero]
    if not which:
        return compat.zero_tangent(out)
    names = _names(which, params)
    named = {**known, **{f"d{i}": tangents[i] for i in which}}
    return tangent.bind(*(named[name] for name in names), names=names, **params)


def _tangent_of_result(primals: Sequence[Any], tangents: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
    return _tangent_of(_of_result(primals[1:]), {0: tangents[1], 1: tangents[4]}, out, params)


def _tangent_impl(*operands: Any, names: tuple[str, ...], **params: Any) -> Any:
    named = dict(zip(names, operands, strict=True))
    half, parts = params["half"], []
    for i in (0, 1):
        if f"d{i}" not in named:
            continue
        d, x = named[f"d{i}"], named[f"x{1 - i}"]
        if _in_half(i, params):
            parts.append(weight_gradients.tangent.bind(*((d, x), (x, d))[i], **in_half_of(params)))
            continue
        _, q, s, _ = quantised(d, E4M3, params["axes"])
        other, scale = _known(named, 1 - i), named[f"s{1 - i}"]
        pair = ((q, other), (other, q))[i]
        parts.append(_scaled_dot(*pair, s * scale, half, dims_of(params), _PRECISE))
    return sum(parts[1:], parts[0])


def _known(named: dict[str, Any], i: int) -> Any:
    """An operand in float8: stored, or the copy from the forward pass in the same trace, or quantised again."""
    if f"q{i}" in named:
        return named[f"q{i}"]
    x, scale = named[f"x{i}"], named[f"s{i}"]
    copy = weight_gradients.copy_of(x, E4M3)
    return quantise.bind(x, scale, dtype=E4M3) if copy is None else copy


def _tangent_abstract_eval(*avals: Any, names: tuple[str, ...], **params: Any) -> Any:
    named = dict(zip(names, avals, strict=True))
    i = 0 if "d0" in named else 1
    pair = (named["d0"], named["x1"]) if i == 0 else (named["x0"], named["d1"])
    of_dot = {**dims_of(params), "precision": None, "preferred_element_type": params["half"]}
    return compat.abstract_eval_in(lax.dot_general_p, params["half"], pair, of_dot)


def _tangent_of_tangent(primals: Sequence[Any], tangents: Sequence[Any], out: Any, params: dict[str, Any]) -> Any:
    params = dict(params)
    names = params.pop("names")
    known, moved = (dict(zip(names, each, strict=True)) for each in (primals, tangents))
    parts = [_tangent_of(known, {i: moved[f"d{i}"] for i in (0, 1) if f"d{i}" in moved}, out, params)]
    for i in (0, 1):  # What the operands contribute, in half.
        if f"d{i}" in known and type(moved[f"x{1 - i}"]) is not ad.Zero:
            pair = known[f"d{i}"], moved[f"x{1 - i}"]
            parts.append(weight_gradients.tangent.bind(*(pair, pair[::-1])[i], **in_half_of(params)))
    return total(parts, out)


def _tangent_transpose(ct: Any, *operands: Any, names: tuple[str, ...], **params: Any) -> Sequence[Any]:
    named = dict(zip(names, operands, strict=True))
    avals = {i: named[f"d{i}"].aval for i in (0, 1) if ad.is_undefined_primal(named.get(f"d{i}"))}
    gradients = _gradients(ct, named, avals, params)
    return [gradients.get(int(name[1])) if name in ("d0", "d1") else None for name in names]


def _gradients(ct: Any, named: dict[str, Any], avals: dict[int, Any], params: dict[str, Any]) -> dict[int, Any]:
    """The cotangents of operands, given their types. The cotangent of the result is quantised once for both."""
    if type(ct) is ad.Zero:
        return {}
    gradients: dict[int, Any] = {}
    quantised_ct = None
    for i, aval in avals.items():
        if _in_half(i, params):
            known = [ad.UndefinedPrimal(aval), named[f"x{1 - i}"]]
            of_operands = ad.primitive_transposes[weight_gradients.tangent](
                ct, *(known if i == 0 else known[::-1]), **in_half_of(params)
            )
            gradients[i] = of_operands[i]
            continue
        if quantised_ct is None:
            quantised_ct = quantised(ct, params["cotangents"], params["axes"])
        j = 1 - i
        other = Operand(named[f"x{j}"], _known(named, j), named[f"s{j}"])
        gradients[i] = _gradient(i, quantised_ct, other, aval, params)
    return gradients


def _gradient(i: int, ct: Operand, other: Operand, aval: Any, params: dict[str, Any]) -> Any:
    """The cotangent of an operand, as a matmul of the result's cotangent and the other operand."""
    dtype = np.dtype(np.float32) if params["parameters"][i] else params["half"]
    of_dot = {**dims_of(params), "precision": _PRECISE, "preferred_element_type": dtype}
    sharding = None
    if aval.sharding.mesh._any_axis_explicit:
        known = [ad.UndefinedPrimal(aval), other.q.astype(params["half"])]
        of_half = {**of_dot, "preferred_element_type": params["half"]}
        known = known if i == 0 else known[::-1]
        sharding = compat.explicit_cotangent_sharding(lax.dot_general_p, ct.x, known, i, of_half)

    def dot(x: Any, y: Any, numbers: Any, **options: Any) -> Any:
        pair = (ct, other) if x is ct.x else (other, ct)
        dims = {"dimension_numbers": numbers, "out_sharding": options["out_sharding"]}
        out = _scaled_dot(pair[0].q, pair[1].q, other.scale * ct.scale, dtype, dims, _PRECISE)
        # Its own derivative is that of the half operands.
        of_half = {**in_half_of({**params, **dims}), "preferred_element_type": dtype}
        return weight_gradients.result.bind(out, *compat.vary_like(out, [x, y]), **of_half)

    gradient = weight_gradients.dot_gradient(i, other.x, ct.x, aval, of_dot, sharding, dot)
    gradient = gradient if dtype == aval.dtype else lax.convert_element_type(gradient, aval.dtype)
    return compat.with_weak_type(gradient, aval)


def _result_transpose(ct: Any, out: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    # Transposes a linear program: the linear map goes through the operands, as the derivative does.
    named = _of_result(operands)
    avals = {i: named[f"x{i}"].aval for i in (0, 1) if ad.is_undefined_primal(named[f"x{i}"])}
    gradients = _gradients(ct, named, avals, params)
    return [None, *(gradients.get(int(name[1])) if name[0] == "x" else None for name in named)]


# Batching. A matmul stays one operation with one scale. Where that is not possible (each example has its own scale,
# because a `cond` has a batched predicate, or the mesh has explicit axes), the derivative is that of half operands.


def _result_batch(args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    (out, *operands), (out_dim, *in_dims) = args, dims
    named, dim_of = _of_result(operands), _of_result(in_dims)
    size = mapped_size(args, dims)
    batched = _batched(named, dim_of, size, params) if out_dim is not None else None
    if batched is None:
        pair = (out, named["x0"], named["x1"])
        in_half = functools.partial(weight_gradients.result.bind, **in_half_of(params))
        return jax.vmap(in_half, (out_dim, dim_of["x0"], dim_of["x1"]))(*pair), 0
    named, numbers, dim = batched
    out = jnp.moveaxis(out, out_dim, dim)
    return result.bind(out, *named.values(), **{**params, "dimension_numbers": numbers}), dim


def _tangent_batch(args: Sequence[Any], dims: Sequence[Any], *, names: tuple[str, ...], **params: Any) -> Any:
    named, dim_of = (dict(zip(names, each, strict=True)) for each in (args, dims))
    size = mapped_size(args, dims)
    batched = _batched(named, dim_of, size, params)
    if batched is not None:
        named, numbers, dim = batched
        return tangent.bind(*named.values(), names=names, **{**params, "dimension_numbers": numbers}), dim

    def in_half(*operands: Any) -> Any:
        named = dict(zip(names, operands, strict=True))
        pairs = [(named[f"d{i}"], named[f"x{1 - i}"])[:: 1 - 2 * i] for i in (0, 1) if f"d{i}" in named]
        parts = [weight_gradients.tangent.bind(*pair, **in_half_of(params)) for pair in pairs]
        return sum(parts[1:], parts[0])

    return jax.vmap(in_half, tuple(dims))(*args), 0


def _batched(named: dict[str, Any], dim_of: dict[str, Any], size: int, params: dict[str, Any]) -> Any:
    """The operands with the batch in front, the dimension numbers, and the batch dimension of the result."""
    if params["out_sharding"] is not None or any(d is not None for name, d in dim_of.items() if name[0] == "s"):
        return None
    sides = [any(d is not None for name, d in dim_of.items() if name in (f"{k}{i}" for k in "dxq")) for i in (0, 1)]
    moved = {
        name: batching.bdim_at_front(x, dim_of[name], size) if name[0] != "s" and sides[int(name[1])] else x
        for name, x in named.items()
    }
    pair = [next(moved[name] for name in moved if name in (f"d{i}", f"x{i}")) for i in (0, 1)]
    first, second = (0 if batched else None for batched in sides)
    _, numbers, dim, _ = weight_gradients.batched_dot(pair, first, second, params)
    return moved, numbers["dimension_numbers"], dim


define(
    scale_of,
    _scale_impl,
    lambda x, dtype: compat.scalar_of(x, np.dtype(np.float32)),
    lambda args, dims, **params: (scale_of.bind(*args, **params), None),
)
set_no_derivative(scale_of)

define(
    quantise,
    _quantise_impl,
    lambda x, scale, dtype: x.update(dtype=dtype, weak_type=False),
    _with_scale(quantise),
)
mlir.register_lowering(quantise, _quantise_for_cuda, platform="cuda")
compat.recompute_always(quantise)
set_no_derivative(quantise, lambda q, x, scale, dtype: weight_gradients.remember_copy(q, x))

define(rescale, lambda out, scale: out * scale.astype(out.dtype), lambda out, scale: out, _with_scale(rescale))
set_no_derivative(rescale)

set_identity(result, _result_batch)
set_derivative(result, _tangent_of_result, (1, 4), _result_transpose)

define(tangent, _tangent_impl, _tangent_abstract_eval, _tangent_batch)
set_derivative(tangent, _tangent_of_tangent, None, _tangent_transpose)


class Scaling(NamedTuple):
    """A way of scaling: `operand(x, dtype, axes)` makes an operand, and `matmul` multiplies two of them."""

    operand: Callable[..., Any]
    matmul: Callable[..., Any]


SCALINGS = {
    "tensor": Scaling(quantised, matmul),
    "block": Scaling(block_scaled.operand, block_scaled.multiply),
}
