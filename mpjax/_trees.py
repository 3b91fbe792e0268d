"""Questions about pytrees and mapped axes that the files of loss scaling share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def same_structure(a: Any, b: Any) -> bool:
    """Whether two trees have one structure."""
    structure: Any = jax.tree.structure(a)
    return structure == jax.tree.structure(b)


def along_leading_axes(x: jax.Array, leaf: Any, name: str, path: str) -> jax.Array:
    """`x`, one value for each member of mapped axes, reshaped to broadcast against a leaf that has them in front."""
    shape = jnp.shape(leaf)
    if shape[: x.ndim] != x.shape:
        raise ValueError(
            f"{name} has shape {x.shape}, one value for each member of a vmap or pmap, but the leaf {path!r} has shape "
            f"{shape}, without these leading axes. Map over axis 0 of both, or call this inside the vmap or pmap."
        )
    return x.reshape(x.shape + (1,) * (len(shape) - x.ndim)) if x.ndim else x
