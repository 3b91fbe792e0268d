"""Checkpoints of a training state with the place in the data it stands at, by Orbax."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from examples.common.cli import UsageError


class Checkpoints:
    """The newest states of a run, in a folder. A context manager: leaving it waits for the disk."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Saves in the background; `state` may be donated as soon as this returns.

        Args:
            step: the number of steps taken, which names the checkpoint.
            state: a pytree of arrays.
            position: JSON: where in the data the next step starts.
        """
        if step in self._manager.all_steps():
            return
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position))
        self._manager.save(step, args=items)

    def restore(self, like: Callable[[dict[str, Any]], Any]) -> tuple[Any, dict[str, Any]] | None:
        """The newest state and its position, or None where nothing was saved yet.

        Args:
            like: of the position, gives a state of the structure that was saved; the restored arrays have its
                shapes, dtypes and shardings.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        position = self._manager.restore(step, args=ocp.args.Composite(position=ocp.args.JsonRestore()))["position"]
        template = jax.tree.map(_abstract, like(position))
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(template)))
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"the checkpoint in {str(self._manager.directory)!r} is not of this model: {error} Give the flags that "
                "it was trained with, or another folder."
            ) from error
        return restored["state"], position


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding; the first device where nothing is said: not the ones that the file names."""
    sharding = getattr(x, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
