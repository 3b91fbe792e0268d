"""What loss scaling adds to a sharded step: collectives, memory and time, on simulated CPU devices.

Parameters and moments are sharded along their first axis, and the batch along its own (FSDP). `python -m
benchmarks.loss_scaling --sharded` times the steps; the collectives are counted in the compiled programs.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.loss_scaling_forms import Form, Loss, forms
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


def compiled_steps(params: Any, loss_fn: Loss, x: jax.Array, y: jax.Array) -> dict[str, tuple[Any, Any]]:
    """For each form, its compiled step, with donated params and state, and the arguments."""
    steps = {}
    found = forms(optax.adam(1e-3), loss_fn)
    for name in FORMS:
        steps[name] = _compiled(found[name], params, x, y)
    return steps


def _compiled(form: Form, params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any]:
    args = place((jax.tree.map(jnp.copy, params), form.init(params), x, y))
    params, state, x, y = args
    sharding = functools.partial(jax.tree.map, lambda leaf: leaf.sharding)
    step: Any = jax.jit(form.step, donate_argnums=(0, 1), out_shardings=(sharding(params), sharding(state), None))
    return step.lower(*args).compile(), args


def counted(compiled: Any) -> collections.Counter[str]:
    """The arrays that a compiled program sends, by kind of collective and dtype."""
    found: collections.Counter[str] = collections.Counter()
    for row in collectives(compiled.as_text()):
        found[f"{row.op} {row.dtype}"] += row.arrays
    return found


def measure(
    params: Any, loss_fn: Loss, x: jax.Array, y: jax.Array, timed: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Times, temporary bytes per device, and added collectives, by form."""
    steps = compiled_steps(params, loss_fn, x, y)
    carried = {name: args[:2] for name, (_, args) in steps.items()}

    def advance(name: str) -> Any:
        compiled, args = steps[name]
        new_params, state, loss = compiled(*carried[name], *args[2:])
        carried[name] = (new_params, state)
        return loss

    rows = timed({name: functools.partial(advance, name) for name in steps})
    plain = counted(steps[FORMS[0]][0])
    for name, (compiled, _) in steps.items():
        rows[name]["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        rows[name]["added_collectives"] = dict(counted(compiled) - plain)
    return rows
