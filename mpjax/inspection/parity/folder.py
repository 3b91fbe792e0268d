"""The folder of a comparison: its settings, and a JSON file for each finished run, so that a later call can continue.

settings.json   the settings that determine the results; a call with other settings raises an error
runs/           a file for each policy and seed
parity.json, parity.html, parity.png   the report
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpjax.inspection.parity.training import Run, with_tuples


def settings_of(make: Callable[..., Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that comparable runs share: the function and its file, versions and the device."""
    inner, given = make, []
    while isinstance(inner, functools.partial):
        given += [*map(repr, inner.args), *(f"{name}={value!r}" for name, value in inner.keywords.items())]
        inner = inner.func
    inner = inspect.unwrap(inner)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    found = {
        "make": f"{getattr(inner, '__module__', '')}:{name}" + (f"({', '.join(given)})" if given else ""),
        "source": _source(inner),
        "jax": importlib.metadata.version("jax"),
        "device": jax.devices()[0].device_kind,
    }
    return json.loads(json.dumps(found | dict(getattr(make, "settings", {})) | dict(more), default=str))


def _source(make: Any) -> str:
    try:
        path = inspect.getsourcefile(make)
        return hashlib.sha256(pathlib.Path(path or "").read_bytes()).hexdigest()[:16]
    except (TypeError, OSError):
        return ""


class Folder:
    """Reads and writes the runs of a comparison. Without a path nothing is saved.

    Raises:
        ValueError: The folder holds runs with other settings, or other files.
    """

    def __init__(self, path: str | os.PathLike[str] | None, settings: Mapping[str, Any]):
        self.path = None if path is None else pathlib.Path(path)
        if self.path is None:
            return
        file = self.path / "settings.json"
        if file.exists():
            self._check(json.loads(file.read_text()), settings)
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(
                f"parity: {os.fspath(self.path)!r} exists and holds no comparison (no settings.json): give a new or "
                "empty folder."
            )
        (self.path / "runs").mkdir(parents=True, exist_ok=True)
        _replace(file, json.dumps(dict(settings), indent=2) + "\n")

    def _check(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        different = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if different:
            listed = ", ".join(f"{n}: {before.get(n)!r} then, {now.get(n)!r} now" for n in different)
            raise ValueError(
                f"parity: the runs in {os.fspath(self.path or '')!r} were made with other settings ({listed}), so they "
                "can't be compared with new ones. Give another folder, or delete this one."
            )

    def read(self, policy: str, seed: int) -> Run | None:
        """A finished run; None if there is none."""
        path = self.path and self.path / "runs" / f"{_slug(policy)}-seed{seed}.json"
        return Run(**with_tuples(json.loads(path.read_text()))) if path and path.exists() else None

    def write(self, run: Run) -> None:
        """Saves a finished run."""
        if self.path is not None:
            # NaN and Infinity are not standard JSON, but Python's json module reads and writes them.
            path = self.path / "runs" / f"{_slug(run.policy)}-seed{run.seed}.json"
            _replace(path, json.dumps(dataclasses.asdict(run)))


def _slug(policy: str) -> str:
    """A readable file name, unique to the policy."""
    return f"{re.sub(r'[^A-Za-z0-9_.+-]+', '_', policy)[:80]}-{zlib.crc32(policy.encode()):08x}"


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)
