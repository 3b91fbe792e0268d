"""One decision for all replicas: reduces "all gradients are finite" over the mapped axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpjax.program import compat


def all_finite(tree: Any, state: Any, axis_name: Any) -> jax.Array:
    """Whether every inexact leaf is finite on every replica. Reads the tree once.

    Args:
        tree: Gradients, or a loss.
        state: An array of the optimizer state. It varies over an axis if each replica there has its own state.
        axis_name: The user's argument; see `dynamic_loss_scale`.

    Returns:
        Array of shape () and dtype bool. It varies over no more manual axes than `state` does.
    """
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all() if leaves else jnp.ones((), jnp.bool_)
    axes = _axes(finite, state, axis_name)
    try:
        return jax.lax.pmin(finite.astype(jnp.int32), axes).astype(jnp.bool_) if axes else finite
    except NameError as error:
        raise NameError(
            f"loss scaling: no pmap, shard_map or vmap around this step has the axis of axis_name={axis_name!r}. Give "
            "the name of its axis. Under jit alone, which sees all devices as one, leave axis_name out."
        ) from error


def _axes(finite: jax.Array, state: Any, axis_name: Any) -> tuple[Any, ...]:
    named = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not manual:
        return named
    if not _varying_axes_are_known(manual):
        if axis_name is None:
            raise ValueError(_refusal(manual))
        return named
    # A replica with its own state (in an ensemble) decides for itself. Replicas that share a state decide together.
    # Under these checks JAX refuses to reduce over an axis that the value does not vary over.
    disagreeing = compat.varying_axes(finite) - compat.varying_axes(state)
    return tuple(n for n in named if n not in manual) + tuple(a for a in manual if a in disagreeing)


def _varying_axes_are_known(manual: tuple[str, ...]) -> bool:
    """Whether `shard_map` tracks varying axes. With `check_vma=False` and in `pmap` it does not."""
    index = jax.eval_shape(lambda: jax.lax.axis_index(manual[0]))
    return index.manual_axis_type is not None and manual[0] in index.manual_axis_type.varying


def _refusal(manual: tuple[str, ...]) -> str:
    if any(str(axis).startswith(("_internal", "<")) for axis in manual):  # names that pmap generates
        axes, give = "an unnamed axis", "the axis a name, pmap(..., axis_name='batch'), and axis_name='batch' here"
    else:
        axes = ", ".join(map(repr, manual))
        name = manual[0] if len(manual) == 1 else manual
        give = f"axis_name={name!r}"
    return (
        f"loss scaling: this step runs inside a pmap or shard_map over {axes}, where each replica would decide by "
        f"itself whether to skip, and replicas would drift apart. Give {give}, and all replicas take one decision. "
        "Or give axis_name=() if the gradients are the same on every replica (averaged before), or if each replica "
        "trains its own model. (shard_map with check_vma=True needs no axis_name: it tracks the axes.)"
    )
