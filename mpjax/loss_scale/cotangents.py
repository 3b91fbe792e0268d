"""Identities that multiply their cotangents by a factor: they scale and unscale a backward pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax.loss_scale.trees import along_leading_axes
from mpjax.policy import HALF_DTYPES, path_string

T = TypeVar("T")

# Flax's FP8 layers return the new values of this collection (amax histories, scales) as its "gradients".
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def is_differentiable(x: Any) -> bool:
    """Whether `x` is an array of a float or complex dtype, including float8. JAX treats Python scalars as constants."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_overwritten(path: str) -> bool:
    """Whether the leaf at a tree path belongs to Flax's collection of values that replace the old ones."""
    return OVERWRITE_WITH_GRADIENT in path.split("/")


def multiply(x: jax.Array, factor: jax.Array, dtype: Any = None) -> jax.Array:
    """`x * factor`, computed in float32 or wider and rounded once, to `dtype` (default: that of `x`)."""
    dtype = np.dtype(dtype or x.dtype)
    wide = jnp.float32 if np.dtype(x.dtype).itemsize < 4 else x.dtype
    product = x.astype(wide) * factor.astype(wide)
    if dtype.itemsize > 1:
        return product.astype(dtype)
    # A cast to float8 gives NaN above its largest number. Finite values saturate instead.
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(product), jnp.clip(product, -largest, largest), product).astype(dtype)


def unscale_by(grads: T, scale: jax.Array) -> T:
    """Divides the differentiable leaves of a tree by `scale`, in float32; half leaves become float32.

    Float8, float64 and complex leaves keep their dtype. Values of Flax's FP8 collection are not gradients and
    are returned unchanged. A scale with leading (mapped) axes divides each member by its own scale.
    """

    def leaf(path: Any, g: Any) -> Any:
        if not is_differentiable(g) or is_overwritten(path_string(path)):
            return g
        factor = along_leading_axes(1.0 / scale, g, "the loss scale", path_string(path))
        return multiply(jnp.asarray(g), factor, jnp.float32 if g.dtype in HALF_DTYPES else g.dtype)

    return jax.tree_util.tree_map_with_path(leaf, grads)


# A primitive, because neither of JAX's custom derivative rules suffices: `custom_vjp` has no forward mode, and a
# `custom_jvp` can't choose the transpose of its tangent. It is applied only to tangents. Its transpose is a product.
_scale_transpose_p = Primitive("mpjax_scale_transpose")
_scale_transpose_p.def_impl(lambda t, factor, *, path: t)
_scale_transpose_p.def_abstract_eval(lambda t, factor, *, path: t)
mlir.register_lowering(_scale_transpose_p, lambda ctx, t, factor, *, path: [t])


def _jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any], *, path: str) -> tuple[Any, Any]:
    t, factor = primals
    dt, _ = tangents
    out = _scale_transpose_p.bind(t, factor, path=path)
    return out, dt if isinstance(dt, ad.Zero) else _scale_transpose_p.bind(dt, factor, path=path)


def _transpose(ct: Any, t: Any, factor: jax.Array, *, path: str) -> tuple[Any, None]:
    if isinstance(ct, ad.Zero):
        return ct, None
    if path and np.dtype(ct.dtype).itemsize < 4:
        raise TypeError(
            f"scale_loss: {path} is {ct.dtype} and differentiated, so JAX would return its gradient in "
            f"{ct.dtype}, and unscaling it there would lose what scaling saved. Use mpjax.value_and_grad or "
            "mpjax.grad (they differentiate at a float32 copy and return float32 gradients), or keep the "
            "parameters in float32 (mpjax.master_weights keeps the master copy of half ones)."
        )
    return multiply(ct, factor), None


def _batch(args: tuple[Any, Any], dims: tuple[Any, Any], *, path: str) -> tuple[Any, Any]:
    """Moves the mapped axes to the front, and broadcasts a mapped factor to the rank of the tangent."""
    (t, factor), (t_dim, factor_dim) = args, dims
    size = t.shape[t_dim] if t_dim is not None else factor.shape[factor_dim]
    t = jnp.broadcast_to(t, (size, *t.shape)) if t_dim is None else jnp.moveaxis(t, t_dim, 0)
    if factor_dim is not None:
        factor = jnp.moveaxis(factor, factor_dim, 0)
        factor = factor.reshape(size, *(factor.shape[1:] or (1,) * (t.ndim - 1)))
    elif factor.ndim:
        factor = factor[None]
    return _scale_transpose_p.bind(t, factor, path=path), 0


ad.primitive_jvps[_scale_transpose_p] = _jvp
ad.primitive_transposes[_scale_transpose_p] = _transpose
batching.primitive_batchers[_scale_transpose_p] = _batch


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def scale_cotangents(
    xs: Sequence[jax.Array], factor: jax.Array, witnesses: Sequence[jax.Array], names: tuple[str, ...]
) -> Sequence[jax.Array]:
    """The identity. The cotangents of `xs` are multiplied by `factor`; tangents are unchanged.

    All arrays that enter or leave a scaled part of a program do so in one call. Where derivatives are nested, JAX
    applies the rule at the innermost one that sees any of the operands, and the outer ones see none. So an argument
    that only an outer derivative varies is not scaled by the inner one.

    Args:
        xs: Differentiable arrays.
        factor: Array of shape () and dtype float32.
        witnesses: Arrays that entered, at the exit. Results that do not depend on what the inner derivative varies
            then leave at the same derivative as the arguments entered.
        names: For each of `xs`, a name if its cotangent is a gradient, which must not be half; otherwise "".
    """
    return list(xs)


def _scale_cotangents_jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    xs, factor, _ = primals

    def leaf(t: Any, name: str) -> Any:
        return t if isinstance(t, SymbolicZero) else _scale_transpose_p.bind(t, factor, path=name)

    return list(xs), [leaf(t, name) for t, name in zip(tangents[0], names, strict=True)]


scale_cotangents.defjvp(_scale_cotangents_jvp, symbolic_zeros=True)
