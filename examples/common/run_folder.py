"""The folder of a run: its settings, a line per epoch, and its summary.

config.json     the flags, of which --resume takes those that are not given and checks the others
data.json       the facts about the data that the model needs, so that it can be used without the data
metrics.jsonl   a line per finished epoch
summary.json    the result; written when the run finishes
curves.png      the metrics by epoch, where matplotlib is installed
tensorboard/    the same metrics, and those of every --log-every steps, as event files
checkpoints/    Orbax checkpoints, which also hold the first three files; best/ has that of the best epoch
.lock           locked by the process that trains

Each file is replaced atomically. A process that is killed at any moment leaves the old or the new
version.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import simplejson

from examples.common.checkpoints import newest_position
from examples.common.cli import UsageError, one_line, process_id, say
from examples.common.flags import as_text


class RunFolder(contextlib.ExitStack):
    """The paths and files of a run. `create` and `reopen` lock it. As a context manager, it unlocks on exit."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.checkpoints, self.best = path / "checkpoints", path / "best"

    @classmethod
    def create(cls, output: Path | None, parent: Path, config: Mapping[str, Any]) -> RunFolder:
        """Makes a new folder: `output`, which must be empty or new, or the next number in `parent`.

        Never overwrites an earlier run, which may be days of training.
        """
        taken = [int(path.name) for path in parent.glob("*") if path.name.isdecimal()]
        path = output or parent / f"{max(taken, default=0) + 1:04d}"
        if path.exists() and not path.is_dir():
            raise UsageError(f"--output {str(path)!r} is a file; give a folder, new or empty.")
        if path.is_dir() and any(entry.name != ".lock" for entry in path.iterdir()):
            remedy = "give another folder, leave --output out (a new numbered folder), or delete it first."
            held = "it may hold a run. Continue that run with --resume"
            raise UsageError(f"--output {str(path)!r} is not empty; {held}, {remedy}")
        folder = cls(path)
        path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        write_json(path / "config.json", config)
        return folder

    @classmethod
    def reopen(cls, output: Path, config: Mapping[str, Any], may_change: Collection[str] = ()) -> RunFolder:
        """Opens the folder of an earlier run, which must have the same settings except those in `may_change`."""
        folder, now = cls(output), json.loads(json.dumps(config))
        before = now if folder.blank else folder.settings(now.get("script", ""), "--resume")
        for name in sorted({*before, *now}.difference(may_change)):
            if before.get(name) != now.get(name):
                differ = f"has {as_text(name, before.get(name))}, but this command has {now.get(name)}"
                remedy = "Leave it out, or start a new run in another folder."
                raise UsageError(f"--resume: the run in {str(output)!r} {differ}. {remedy}")
        folder.lock()
        return folder

    @property
    def blank(self) -> bool:
        """Whether a run was killed here before it wrote its first file: nothing to continue, nothing to lose."""
        return self.path.is_dir() and all(path.name in (".lock", "config.json.part") for path in self.path.iterdir())

    def lock(self) -> None:
        """Locks the folder until `close` or the end of this process.

        Raises:
            UsageError: Another process has locked it.
        """
        try:
            import fcntl
        except ImportError:  # On Windows, the user must avoid two runs in one folder.
            return
        file = self.enter_context((self.path / ".lock").open("a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            what = "another process is training there. Wait for it, end it, or give another folder."
            raise UsageError(f"--output {str(self.path)!r}: {what}") from error

    def settings(self, script: str, flag: str = "--output") -> dict[str, Any]:
        """The flags that the run was started with.

        Raises:
            UsageError: The folder holds no run, or that of another script.
        """
        return of_script(self._known("config.json", "settings", flag), script, flag, self.path)

    def description(self) -> dict[str, Any]:
        """The facts about the data that the model needs."""
        return self._known("data.json", "description")

    def _known(self, name: str, entry: str, flag: str = "--output") -> dict[str, Any]:
        """The content of a file, or where it is missing or damaged, the copy in the newest checkpoint."""
        path = self.path / name
        try:
            return _read_object(path)
        except (OSError, ValueError) as error:
            found = newest_position(self.checkpoints).get(entry)
            if found is None:
                why = f"holds no run (no readable {name}: {one_line(error)}); give the folder of a training."
                raise UsageError(f"{flag}: {str(self.path)!r} {why}") from error
            say(f"{path} can't be read ({one_line(error)}): the newest checkpoint has a copy")
            return found

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result; None if the run has not finished."""
        path = self.path / "summary.json"
        try:
            return _read_object(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            say(f"{path} can't be read ({one_line(error)}): it is written again")
            return None

    def begin(self, config: Mapping[str, Any], description: Mapping[str, Any], lines: Sequence[Any]) -> None:
        """Writes what is known when training begins or continues, and drops what later epochs had written."""
        write_json(self.path / "config.json", config)
        write_json(self.path / "data.json", description)
        self.write_metrics(lines)
        if process_id() == 0:
            (self.path / "summary.json").unlink(missing_ok=True)

    def write_metrics(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes the lines of the finished epochs, oldest first."""
        _replace(self.path / "metrics.jsonl", "".join(to_json(line) + "\n" for line in lines))


def read_settings(path: Path, script: str, flag: str) -> dict[str, Any]:
    """The flags in the config.json of a run of this script."""
    try:
        found = _read_object(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {str(path)!r} is not the config.json of a run: {one_line(error)}") from error
    return of_script(found, script, flag, path)


def of_script(settings: dict[str, Any], script: str, flag: str, source: Path) -> dict[str, Any]:
    """The settings of a run; raises a `UsageError` if they are those of another script."""
    if (owner := settings.get("script")) != script:
        whose = f"of examples.{owner}" if owner else "of an older version"
        raise UsageError(f"{flag}: {str(source)!r} holds a run {whose}, not of examples.{script}.")
    return settings


def _read_object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"it is not an object: {found!r:.50}")
    return found


def check_identity(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compares what identifies the data of a run and of this command: digests, and the order of the outputs.

    Raises:
        UsageError: They differ: the weights belong to other data, or to other outputs.
    """
    for name in sorted({*before, *now}):
        if (one := before.get(name)) == (other := now.get(name)):
            continue
        how = f"{one or 'none'} in the run, {other or 'none'} here"
        if isinstance(one, list) and isinstance(other, list):
            pairs = enumerate(itertools.zip_longest(one, other))
            place, (a, b) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            how = f"number {place + 1} is {a!r} in the run, {b!r} here"
        remedy = "Put them back, or start a new run with --init-from."
        raise UsageError(f"--resume: the {name} differ ({how}); a run can only be resumed with the same data. {remedy}")


def to_json(value: Any, indent: int | None = None) -> str:
    """Standard JSON: null where Python would write NaN or Infinity."""
    return simplejson.dumps(value, indent=indent, ignore_nan=True, namedtuple_as_object=False)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    _replace(path, to_json(value, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    if process_id():
        return
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # Otherwise a crash of the machine may leave an empty file under the new name.
        os.replace(part, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # Errors of writing name no file.
