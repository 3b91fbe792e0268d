"""The folder that a run writes into: its settings, a line per epoch, and its summary.

config.json     the flags of the run, so that --resume can tell another run from this one
metrics.jsonl   a line per finished epoch
summary.json    the outcome; there only when the run has finished
curves.png      the curves
tensorboard/    the same metrics as event files
checkpoints/    Orbax

Each file is replaced whole: a process that is killed at any moment leaves the one before or the one after.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.common.cli import UsageError


class RunFolder:
    """Paths and files of one run. Made by `create` or `reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.curves = path / "curves.png"

    @classmethod
    def create(cls, output: Path | None, parent: Path, config: Mapping[str, Any]) -> RunFolder:
        """A fresh folder: `output`, which must be empty or new, else the next number in `parent`.

        An earlier run is never written over: what is in `output` may be days of training.
        """
        path = _next_number(parent) if output is None else output
        if path.exists() and not path.is_dir():
            raise UsageError(f"--output {str(path)!r} is a file; give a folder, new or empty.")
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(
                f"--output {str(path)!r} is not empty; it may hold a run. Continue that run with --resume, "
                "give another folder, leave --output out (a new numbered folder), or delete it first."
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / "config.json", config)
        except OSError as error:
            raise UsageError(f"--output {str(path)!r} cannot be written to: {error.strerror}.") from error
        return cls(path)

    @classmethod
    def reopen(cls, output: Path | None, config: Mapping[str, Any], may_change: Collection[str] = ()) -> RunFolder:
        """The folder of an earlier run that was started with the same settings, but for those of `may_change`."""
        if output is None:
            raise UsageError("--resume needs the folder of the run to continue: add --output DIR.")
        if output.is_dir() and all(path.name == "config.json.part" for path in output.iterdir()):
            # Killed before its first file was whole: there is nothing to continue, and nothing to lose.
            write_json(output / "config.json", config)
        try:
            before = json.loads((output / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--resume: {str(output)!r} holds no run (no readable config.json); check --output, or start "
                "a new run there without --resume."
            ) from error
        now = json.loads(json.dumps(config))
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name) and name not in may_change:
                flag = "--" + name.replace("_", "-")
                raise UsageError(
                    f"--resume: the run in {str(output)!r} has {flag} {before.get(name)}, this command has "
                    f"{now.get(name)}. Give the same flags, or start a new run in another folder."
                )
        if before != now:
            write_json(output / "config.json", now)
        return cls(output)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The finished epochs, oldest first."""
        try:
            return [json.loads(line) for line in self._metrics_path.read_text().splitlines()]
        except FileNotFoundError:
            return []

    @property
    def summary(self) -> dict[str, Any] | None:
        """The outcome, or None where the run has not finished."""
        try:
            return json.loads((self.path / "summary.json").read_text())
        except FileNotFoundError:
            return None

    def keep_metrics(self, epochs: int) -> None:
        """Drops what was logged after the checkpoint: those epochs are about to run again."""
        self._write_metrics(self.metrics[:epochs])

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Writes the line of one epoch."""
        self._write_metrics([*self.metrics, line])

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Writes the outcome; from here on the run counts as finished."""
        write_json(self.path / "summary.json", summary)

    def _write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        _replace(self._metrics_path, "".join(json.dumps(line) + "\n" for line in lines))

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    _replace(path, json.dumps(value, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def _next_number(parent: Path) -> Path:
    taken = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    return parent / f"{max(taken, default=0) + 1:04d}"
