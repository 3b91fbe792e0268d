"""Structure, layout, dtypes and mapped axes of trees, for the modules of loss scaling."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.experimental.layout import Layout, with_layout_constraint

from mpjax.policy import is_half
from mpjax.program import compat

T = TypeVar("T")


def same_structure(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure."""
    structure: Any = jax.tree.structure(a)
    return structure == jax.tree.structure(b)


def row_major(tree: T) -> T:
    """Constrains a tree to row-major layout, that of arguments, inside `jit`. Outside it is unchanged.

    A matmul may produce a transposed gradient. XLA can't fuse the transpose into an update inside a `cond`, and
    would hold a second copy of the gradients there.
    """
    if not compat.shards_layout_constraints():
        return tree

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer) or jnp.ndim(x) < 2 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(leaf, tree)


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


def settled(inner: optax.GradientTransformationExtraArgs, state: Any, params: Any) -> Any:
    """The initial state of `inner`, in the dtypes that float32 params and gradients give it.

    Adam's moments would otherwise have the dtype of half params. The second one would flush to zero, and the first
    one would become float32, the gradients' dtype, at the first update. A state that changes dtype costs a retrace
    and can't be carried by `scan`. Dtypes that the transformation sets (`mu_dtype`, float32 masters) are kept.
    """
    if not any(map(is_half, jax.tree.leaves(params))):
        return state

    def update(state: Any, params: Any) -> Any:
        return inner.update(widened(params), state, params, value=jnp.float32(0))[1]

    with jax.numpy_dtype_promotion("standard"):
        state = cast_like(state, jax.eval_shape(lambda p: inner.init(widened(p)), params))
        try:
            return cast_like(state, jax.eval_shape(update, state, params))
        except Exception:
            # The update can't be called yet, for example because it needs further arguments. The first step casts.
            return state


def cast_like(state: Any, like: Any) -> Any:
    """Casts a state to the dtypes of another one. States of different structure are returned unchanged."""
    if not same_structure(state, like):
        return state
    return jax.tree.map(lambda x, to: x if jnp.result_type(x) == to.dtype else jnp.asarray(x, to.dtype), state, like)
