"""Questions about pytrees and mapped axes that the files of loss scaling share."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mpjax._jaxpr import compat

T = TypeVar("T")


def same_structure(a: Any, b: Any) -> bool:
    """Whether two trees have one structure."""
    structure: Any = jax.tree.structure(a)
    return structure == jax.tree.structure(b)


def row_major(tree: T) -> T:
    """The tree in the layout that its arguments have, inside of `jit`; outside, as it is.

    A gradient leaves its matmul transposed. In front of a `cond` XLA can't fuse the transpose into the update,
    and would hold a second copy of the gradients inside of it.
    """
    if not compat.shards_layout_constraints():
        return tree

    def leaf(x: Any) -> Any:
        if not isinstance(x, jax.core.Tracer) or jnp.ndim(x) < 2 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.tree.map(leaf, tree)


def along_leading_axes(x: jax.Array, leaf: Any, name: str, path: str) -> jax.Array:
    """`x`, one value for each member of mapped axes, reshaped to broadcast against a leaf that has them in front."""
    shape = jnp.shape(leaf)
    if shape[: x.ndim] != x.shape:
        raise ValueError(
            f"{name} has shape {x.shape}, one value for each member of a vmap or pmap, but the leaf {path!r} has shape "
            f"{shape}, without these leading axes. Map over axis 0 of both, or call this inside the vmap or pmap."
        )
    return x.reshape(x.shape + (1,) * (len(shape) - x.ndim)) if x.ndim else x
