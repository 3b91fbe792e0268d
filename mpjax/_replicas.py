"""One decision for all replicas: over which mapped axes "all gradients are finite" is reduced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def all_finite(tree: Any, state: Any, axis_name: Any) -> jax.Array:
    """Whether every inexact leaf is finite, on every replica: one read of the tree.

    Args:
        tree: gradients, or a loss.
        state: an array of the optimizer state that all replicas of one model share, or each replica has of its own.
        axis_name: what the user gave; see `dynamic_loss_scale`.

    Returns:
        Shape (), bool; it varies over no more manual axes than `state` does.
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all() if leaves else jnp.ones((), jnp.bool_)
    axes = _axes(finite, state, axis_name)
    return jax.lax.pmin(finite.astype(jnp.int32), axes).astype(jnp.bool_) if axes else finite


def _axes(finite: jax.Array, state: Any, axis_name: Any) -> tuple[Any, ...]:
    named = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return named
    if not _varying_axes_are_known(manual):
        if axis_name is None:
            raise ValueError(_refusal(manual))
        return named
    # A replica with a state of its own (an ensemble) decides for itself; replicas of one state decide together.
    # Under these checks JAX refuses to reduce over an axis that the value does not vary over.
    disagreeing = _varying(finite) - _varying(state)
    return tuple(n for n in named if n not in manual) + tuple(a for a in manual if a in disagreeing)


def _varying(x: Any) -> frozenset[str]:
    """The manual mesh axes along which the replicas of a value differ, as `shard_map`'s checks know it."""
    return jax.typeof(x).manual_axis_type.varying


def _varying_axes_are_known(manual: tuple[str, ...]) -> bool:
    """Whether `shard_map` keeps track of varying axes: not with `check_vma=False`, nor in `pmap`."""
    index = jax.eval_shape(lambda: jax.lax.axis_index(manual[0]))
    return index.manual_axis_type is not None and manual[0] in index.manual_axis_type.varying


def _refusal(manual: tuple[str, ...]) -> str:
    if any(str(axis).startswith(("_internal", "<")) for axis in manual):  # the names that pmap makes up
        axes, give = "an unnamed axis", "the axis a name, pmap(..., axis_name='batch'), and axis_name='batch' here"
    else:
        axes = ", ".join(map(repr, manual))
        name = manual[0] if len(manual) == 1 else manual
        give = f"axis_name={name!r}"
    return (
        f"loss scaling: this step runs inside a pmap or shard_map over {axes}, where each replica would decide by "
        f"itself whether to skip, and replicas would drift apart. Give {give}: all replicas take one decision. "
        "Or axis_name=(): the gradients are the same on every replica (averaged before), or each replica trains "
        "a model of its own. (shard_map with check_vma=True needs no axis_name: it knows the axes.)"
    )
