"""The epochs of a run as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.common.hosts import is_main


class EventFiles:
    """Writes every number of an epoch's line as a scalar, over the steps. A context manager.

    Args:
        folder: of the run; `tensorboard --logdir` takes it, or the folder of all runs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._purge_step: int | None = None

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def resume_after(self, step: int) -> None:
        """What an interrupted run wrote of later steps is about to come again: TensorBoard drops it."""
        self._purge_step = step + 1

    def write(self, line: Mapping[str, Any]) -> None:
        if not is_main():
            return
        writer = self._open()
        for name, value in line.items():
            if isinstance(value, int | float) and name not in ("epoch", "step"):
                writer.add_scalar(name, value, line["step"])
        writer.flush()

    def _open(self) -> Any:
        if self._writer is None:
            # Imported here: it takes a second, and a benchmark writes no events.
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=self._purge_step)
        return self._writer
