"""Checkpoints of a training state with the place in the data it stands at, by Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from examples.common.cli import UsageError

T = TypeVar("T")


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

    def restore(self, like: T) -> tuple[T, dict[str, Any]]:
        """The newest state and its position.

        Args:
            like: a state of the same structure; the restored arrays have its shapes and dtypes.

        Raises:
            UsageError: there is no checkpoint, or it is of another model.
        """
        step = self._manager.latest_step()
        if step is None:
            raise UsageError(
                f"--resume: no checkpoint in {str(self._manager.directory)!r}; the run was ended before the "
                "first. Delete the folder and start without --resume."
            )
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(template), position=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=items)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--resume: the checkpoint in {str(self._manager.directory)!r} is not of this model: {error}"
            ) from error
        return restored["state"], restored["position"]
