"""The folder of a run: its settings, a line per epoch, and its summary.

config.json     the flags that decide the result, with which --resume checks that the run is the same
data.json       the facts about the data that the model needs, so that it can be used without the data
metrics.jsonl   a line per finished epoch
summary.json    the result; written when the run finishes
tensorboard/    the same metrics, and those of every --log-every steps, as event files
checkpoints/    Orbax checkpoints; best/ has that of the best epoch
.lock           locked by the process that trains

Each file is replaced atomically. A process that is killed at any moment leaves the old or the new
version.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.common.cli import UsageError


class RunFolder:
    """The paths and files of a run. `create` and `reopen` lock it. As a context manager, it unlocks on exit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.best = path / "checkpoints", path / "best"
        self._lock: Any = None

    @classmethod
    def create(cls, output: Path | None, parent: Path, config: Mapping[str, Any]) -> RunFolder:
        """Makes a new folder: `output`, which must be empty or new, or the next number in `parent`.

        Never overwrites an earlier run, which may be days of training.
        """
        path = _next_number(parent) if output is None else output
        if path.exists() and not path.is_dir():
            raise UsageError(f"--output {str(path)!r} is a file; give a folder, new or empty.")
        if path.is_dir() and any(entry.name != ".lock" for entry in path.iterdir()):
            raise UsageError(
                f"--output {str(path)!r} is not empty; it may hold a run. Continue that run with --resume, "
                "give another folder, leave --output out (a new numbered folder), or delete it first."
            )
        folder = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        write_json(path / "config.json", config)
        return folder

    @classmethod
    def reopen(cls, output: Path, config: Mapping[str, Any], may_change: Collection[str] = ()) -> RunFolder:
        """Opens the folder of an earlier run, which must have the same settings except those in `may_change`."""
        folder = cls(output)
        if output.is_dir():
            folder.lock()
            if all(path.name in (".lock", "config.json.part") for path in output.iterdir()):
                # The run was killed before it wrote its first file: nothing to continue, nothing to lose.
                write_json(output / "config.json", config)
        try:
            folder._update_settings(json.loads(json.dumps(config)), may_change)
        except BaseException:
            folder.unlock()
            raise
        return folder

    def _update_settings(self, now: dict[str, Any], may_change: Collection[str]) -> None:
        before = self.settings(now.get("script", ""), "--resume")
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name) and name not in may_change:
                flag = "--" + name.replace("_", "-")
                raise UsageError(
                    f"--resume: the run in {str(self.path)!r} has {flag} {before.get(name)}, but this command has "
                    f"{now.get(name)}. Give the same flags, or start a new run in another folder."
                )
        if before != now:
            write_json(self.path / "config.json", now)

    def lock(self) -> None:
        """Locks the folder until `unlock` or the end of this process.

        Raises:
            UsageError: Another process has locked it.
        """
        try:
            import fcntl
        except ImportError:  # On Windows, the user must avoid two runs in one folder.
            return
        self._lock = (self.path / ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.unlock()
            raise UsageError(
                f"--output {str(self.path)!r}: another process is training there. Wait for it, end it, or give another "
                "folder."
            ) from error

    def unlock(self) -> None:
        """Releases the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()

    def settings(self, script: str, flag: str = "--output") -> dict[str, Any]:
        """The flags that the run was started with.

        Raises:
            UsageError: The folder holds no run, or that of another script.
        """
        try:
            found = json.loads((self.path / "config.json").read_text())
            owner = found.get("script")
        except (OSError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{flag}: {str(self.path)!r} holds no run (no readable config.json); give the folder of a training."
            ) from error
        if owner != script:
            whose = f"of examples.{owner}" if owner else "of an older version"
            raise UsageError(f"{flag}: {str(self.path)!r} holds a run {whose}, not of examples.{script}.")
        return found

    def description(self) -> dict[str, Any]:
        """The facts about the data that the model needs."""
        try:
            return json.loads((self.path / "data.json").read_text())
        except (OSError, ValueError) as error:
            raise UsageError(f"--output {str(self.path)!r} holds no readable data.json: {error}") from error

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the finished epochs, oldest first."""
        lines = _lines(self.path / "metrics.jsonl")
        return [{name: math.nan if value is None else value for name, value in line.items()} for line in lines]

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result; None if the run has not finished."""
        try:
            return json.loads((self.path / "summary.json").read_text())
        except FileNotFoundError:
            return None

    def keep_metrics(self, epochs: int) -> None:
        """Drops the lines logged after the checkpoint, since those epochs will run again."""
        self._write_metrics(self.metrics[:epochs])
        (self.path / "summary.json").unlink(missing_ok=True)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Writes the line of one epoch."""
        self._write_metrics([*self.metrics, line])

    def _write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        _replace(self.path / "metrics.jsonl", "".join(to_json(line) + "\n" for line in lines))


def to_json(value: Any, indent: int | None = None) -> str:
    """Standard JSON: null where Python would write NaN or Infinity."""

    def finite(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: finite(item) for name, item in x.items()}
        if isinstance(x, list | tuple):
            return [finite(item) for item in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    _replace(path, to_json(value, indent=2) + "\n")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file. The last line may be truncated if the process was killed."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            return


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # Otherwise a crash of the machine may leave an empty file under the new name.
    os.replace(part, path)


def _next_number(parent: Path) -> Path:
    taken = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
    return parent / f"{max(taken, default=0) + 1:04d}"
