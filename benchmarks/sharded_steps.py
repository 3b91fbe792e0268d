"""A sharded step on simulated CPU devices, and its collectives.

Parameters and moments are sharded along their first axis, and the batch along its own (FSDP). `python -m
benchmarks.loss_scaling --sharded` times such steps, and counts what loss scaling adds to them.
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.loss_scaling_forms import Form
from mpjax.inspection.auditing.communication import collectives

DEVICES = 4
# The forms that shard: the step without loss scaling, twice, and the step with mpjax's.
FORMS = ("no loss scaling", "no loss scaling, again", "mpjax: apply_gradients", "mpjax: tx.update, apply_updates")


def place(tree: Any) -> Any:
    """Arrays on the devices: matrices sharded along their first axis, scalars on all."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def leaf(x: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec("data") if np.ndim(x) else PartitionSpec()))

    return jax.tree.map(leaf, tree)


def compiled(form: Form, params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    """A form's step, with donated params and state, and its arguments."""
    args = place((params, form.init(params), x, y))
    carried = jax.tree.map(lambda leaf: leaf.sharding, args[:2])
    step: Any = jax.jit(form.step, donate_argnums=(0, 1), out_shardings=(*carried, None))
    return step.lower(*args).compile(), args


def counted(compiled: Any) -> collections.Counter[str]:
    """The arrays that a compiled program sends, by kind of collective and dtype."""
    found: collections.Counter[str] = collections.Counter()
    for row in collectives(compiled.as_text()):
        found[f"{row.op} {row.dtype}"] += row.arrays
    return found
