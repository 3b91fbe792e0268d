"""Identities that multiply their cotangents by a factor: they scale and unscale a backward pass.

Where derivatives are nested, one of them is scaled, and the others are not. A scalar, the `mark`, tells them apart: it
is zero, and only the scaled derivative varies it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.extend.core import Primitive
from jax.interpreters import ad

from mpjax.kernels.derivatives import mapped_size, set_identity
from mpjax.policy import HALF_DTYPES, is_half, path_string
from mpjax.program import compat, contexts
from mpjax.program.source import SCALED

T = TypeVar("T")

# Flax's FP8 layers return the new values of this collection (amax histories, scales) as its "gradients".
OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"


def is_differentiable(x: Any) -> bool:
    """Whether `x` is an array of a float or complex dtype, including float8. JAX treats Python scalars as constants."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def is_overwritten(path: str) -> bool:
    """Whether the leaf at a tree path belongs to Flax's collection of values that replace the old ones."""
    return OVERWRITE_WITH_GRADIENT in path.split("/")


def widened(tree: T) -> T:
    """The tree with half arrays in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


def along_leading_axes(x: jax.Array, leaf: Any, name: str, path: str) -> jax.Array:
    """Reshapes `x`, one value for each member of mapped axes, to broadcast against a leaf with these leading axes."""
    shape = jnp.shape(leaf)
    if shape[: x.ndim] != x.shape:
        raise ValueError(
            f"{name} has shape {x.shape}, one value for each member of a vmap or pmap, but the leaf {path!r} has shape "
            f"{shape}, without these leading axes. Map over axis 0 of both, or call this inside the vmap or pmap."
        )
    return x.reshape(x.shape + (1,) * (len(shape) - x.ndim)) if x.ndim else x


def multiply(x: jax.Array, factor: jax.Array, dtype: Any = None) -> jax.Array:
    """`x * factor`, computed in float32 or wider and rounded once, to `dtype` (default: that of `x`)."""
    dtype = np.dtype(dtype or x.dtype)
    wide = jnp.float32 if np.dtype(x.dtype).itemsize < 4 else x.dtype
    with jax.named_scope(SCALED):
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


def _jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any], *, path: str) -> tuple[Any, Any]:
    # A derivative of the tangent is another one than the scaled derivative. It enters where the primal values do, at no
    # boundary, so it must leave at none.
    return _scale_transpose_p.bind(*primals, path=path), tangents[0]


def _transpose(ct: Any, t: Any, factor: jax.Array, *, path: str) -> tuple[Any, None]:
    if isinstance(ct, ad.Zero):
        return ct, None
    ct = jnp.asarray(ct)  # a user may give a Python number to the function of `jax.vjp`
    if path and np.dtype(ct.dtype).itemsize < 4:
        raise TypeError(
            f"scale_loss: {path} is {ct.dtype} and differentiated, so JAX would return its gradient in "
            f"{ct.dtype}, and unscaling it there would lose what scaling saved. Use mpjax.value_and_grad or "
            "mpjax.grad (they differentiate at a float32 copy and return float32 gradients), or keep the "
            "parameters in float32 (mpjax.master_weights keeps the master copy of half ones)."
        )
    return multiply(ct, factor), None


def _batch(args: tuple[Any, Any], dims: tuple[Any, Any], *, path: str) -> tuple[Any, Any]:
    (t, factor), (t_dim, factor_dim) = args, dims
    return _scale_transpose_p.bind(*_to_front(mapped_size(args, dims), t, t_dim, factor, factor_dim), path=path), 0


def _to_front(size: int, t: Any, t_dim: Any, factor: Any, factor_dim: Any) -> tuple[Any, Any]:
    """Moves the mapped axes to the front, and broadcasts a mapped factor to the rank of the tangent."""
    t = jnp.broadcast_to(t, (size, *t.shape)) if t_dim is None else jnp.moveaxis(t, t_dim, 0)
    if factor_dim is not None:
        factor = jnp.moveaxis(factor, factor_dim, 0)
        factor = factor.reshape(size, *(factor.shape[1:] or (1,) * (t.ndim - 1)))
    elif factor.ndim:
        factor = factor[None]
    return t, factor


set_identity(_scale_transpose_p, _batch)
ad.primitive_jvps[_scale_transpose_p] = _jvp
ad.primitive_transposes[_scale_transpose_p] = _transpose


# The tangent of a mark. It depends on another tangent, so that it is not a known zero, and its transpose is zero.
_mark_p = Primitive("mpjax_mark")
set_identity(_mark_p, lambda args, dims: (_mark_p.bind(*args), dims[1]), operand=1)
ad.primitive_jvps[_mark_p] = lambda primals, tangents: (_mark_p.bind(*primals), ad.Zero(jax.typeof(primals[1])))
ad.primitive_transposes[_mark_p] = lambda ct, t, mark: [ad.Zero(t.aval), None]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def enter(xs: Sequence[jax.Array], factor: jax.Array, names: tuple[str, ...]) -> tuple[Sequence[jax.Array], jax.Array]:
    """The identity, and a mark. The cotangents of `xs` are multiplied by `factor`; tangents are unchanged.

    The scaled derivative is the innermost one that varies any of `xs`. Only it varies the mark.

    Args:
        xs: Differentiable arrays.
        factor: Array of shape () and dtype float32.
        names: For each of `xs`, a name for errors. Their cotangents are gradients, which must not be half.
    """
    return list(xs), jnp.zeros((), jnp.float32)


def _enter_jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    xs, factor = primals
    varied = [t for t in tangents[0] if not isinstance(t, SymbolicZero)]
    if not varied:  # only the factor varies
        return enter(xs, factor, names), ([*tangents[0]], zero_from_primal(jnp.zeros((), jnp.float32)))
    mark = jnp.zeros((), jnp.float32)
    return (list(xs), mark), (_scaled(tangents[0], factor, names), _mark_p.bind(varied[0], mark))


enter.defjvp(_enter_jvp, symbolic_zeros=True)


@jax.custom_jvp
def leave(xs: Sequence[jax.Array], factor: jax.Array) -> Sequence[jax.Array]:
    """The identity, which multiplies the cotangents of `xs` by `factor` in every derivative."""
    return list(xs)


def _leave_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    xs, factor = primals
    return list(xs), _scaled(tangents[0], factor, [""] * len(xs))


leave.defjvp(_leave_jvp, symbolic_zeros=True)


def _scaled(tangents: Sequence[Any], factor: jax.Array, names: Sequence[str]) -> list[Any]:
    return [
        t if isinstance(t, SymbolicZero) else _scale_transpose_p.bind(t, factor, path=name)
        for t, name in zip(tangents, names, strict=True)
    ]


@jax.custom_jvp
def cross(xs: Sequence[jax.Array], factor: jax.Array, inverse: jax.Array, mark: jax.Array) -> Sequence[jax.Array]:
    """The identity. The scaled derivative, that of the mark, multiplies the cotangents of `xs` by `factor`.

    Other derivatives see an identity. What they make of `xs`, tangents or cotangents, crosses here as well.

    Args:
        xs: Differentiable arrays.
        factor, inverse: Arrays of shape () and dtype float32; 1 = factor × inverse.
        mark: The mark of the scaled derivative.
    """
    return list(xs)


def _cross_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    xs, *how = primals
    if not isinstance(tangents[3], SymbolicZero):
        return list(xs), _scaled(tangents[0], how[0], [""] * len(xs))
    return cross(xs, *how), [t if isinstance(t, SymbolicZero) else _cross_p.bind(t, *how) for t in tangents[0]]


cross.defjvp(_cross_jvp, symbolic_zeros=True)

# `cross` of one tangent, which has a transpose: what enters in the forward direction leaves in the backward direction.
_cross_p = Primitive("mpjax_cross")


def _cross_tangent_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    t, *how = primals
    dt, *_, mark = tangents
    if isinstance(mark, ad.Zero):
        return _cross_p.bind(t, *how), dt if isinstance(dt, ad.Zero) else _cross_p.bind(dt, *how)
    return t, dt if isinstance(dt, ad.Zero) else _scale_transpose_p.bind(dt, how[0], path="")


def _cross_transpose(ct: Any, t: Any, factor: Any, inverse: Any, mark: Any) -> list[Any]:
    return [ct if isinstance(ct, ad.Zero) else _cross_p.bind(ct, inverse, factor, mark), None, None, None]


def _cross_batch(args: Any, dims: Any) -> tuple[Any, Any]:
    (t, factor, inverse, mark), size = args, mapped_size(args, dims)
    t, factor = _to_front(size, t, dims[0], factor, dims[1])
    _, inverse = _to_front(size, t, 0, inverse, dims[2])
    return _cross_p.bind(t, factor, inverse, mark), 0


set_identity(_cross_p, _cross_batch)
ad.primitive_jvps[_cross_p] = _cross_tangent_jvp
ad.primitive_transposes[_cross_p] = _cross_transpose


def crossed(arrays: Sequence[Any], factor: jax.Array, inverse: jax.Array, mark: Any) -> list[Any]:
    """`cross` of the differentiable arrays; without a mark, in every derivative."""
    inexact = [x for x in arrays if is_differentiable(x)]
    found = iter(leave(inexact, factor) if mark is None else cross(inexact, factor, inverse, mark))
    return [next(found) if is_differentiable(x) else x for x in arrays]


# Which of the nested derivatives are scaled where code runs: those of the scaled losses that it belongs to.


class Level:
    """A scaled derivative, while its loss is traced.

    jit's cache key holds it, because a function that was traced in one loss must not be reused in another if it read
    the mark. Other functions are: two levels that nothing read are equal.
    """

    def __init__(self, scale: jax.Array, mark: jax.Array) -> None:
        self._how: Any = scale, mark
        self._is_read = False

    def read(self) -> tuple[jax.Array, jax.Array]:
        """The scale and the mark."""
        self._is_read = True
        return self._how

    def end(self) -> None:
        """Drops the tracers."""
        self._how = None

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Level) and not (self._is_read or other._is_read))

    def __hash__(self) -> int:
        return hash(Level)


@contextlib.contextmanager
def level(scale: jax.Array, mark: jax.Array, around: Any) -> Iterator[None]:
    """A context for the code of a scaled loss, given the context around it."""
    new = Level(scale, mark)
    try:
        with contexts.scaled_losses((*(around if isinstance(around, tuple) else ()), new)):
            yield
    finally:
        new.end()


def levels(scale: jax.Array) -> list[tuple[jax.Array, Any]] | None:
    """The scale and the mark of each scaled derivative; None outside of scaled losses.

    The derivatives that a custom_vjp's rules take receive its cotangents, all scaled by `scale`: of a layer that the
    backward rule computes again, or that the forward rule differentiates for it. They have no mark. Nothing
    differentiates the function of the custom_vjp itself.
    """
    scales = contexts.scaled_losses.value
    if scales == contexts.IN_RULE:
        return [(scale, None)]
    if not scales:
        return None if scales is None else []
    found = [level.read() for level in scales]
    part = compat.part_of_custom_vjp(found[-1][1])
    return found if not part else [(scale, None)] if part == "fwd" else []
