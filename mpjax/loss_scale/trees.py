"""Helpers for pytrees and mapped axes, shared by the modules of loss scaling."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mpjax._jaxpr import compat

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


def along_leading_axes(x: jax.Array, leaf: Any, name: str, path: str) -> jax.Array:
    """Reshapes `x`, one value for each member of mapped axes, to broadcast against a leaf with these leading axes."""
    shape = jnp.shape(leaf)
    if shape[: x.ndim] != x.shape:
        raise ValueError(
            f"{name} has shape {x.shape}, one value for each member of a vmap or pmap, but the leaf {path!r} has shape "
            f"{shape}, without these leading axes. Map over axis 0 of both, or call this inside the vmap or pmap."
        )
    return x.reshape(x.shape + (1,) * (len(shape) - x.ndim)) if x.ndim else x
