"""JSON files of results, each with the environment of the measurement."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax

from .environment import environment, versions

# Options that select the output folder or the parts to run; they do not affect results.
_UNRECORDED_OPTIONS = {
    "--out": 1,
    "--programs": None,
    "--scripts": None,
    "--families": 1,
    "--missing": 0,
    "--bound": None,
    "--parts": None,
    "--models": None,
    "--forms": None,
    "--parity": 0,
    "--planned": 0,
    "--tasks": None,
    "--seeds": 1,  # the tables give each row's
    "--dtypes": None,
    "--only": 1,
    "--seconds": 1,
}


def save(name: str, results: Any, folder: pathlib.Path) -> pathlib.Path:
    """Writes the results and the environment to `NAME_PLATFORM.json` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(name, folder)
    content = {"environment": environment(without=_UNRECORDED_OPTIONS), "results": results}
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def previous(name: str, folder: pathlib.Path) -> Any:
    """The results that `save` would replace, to extend them; empty if they are from another device or version."""
    path = _path(name, folder)
    found = json.loads(path.read_text()) if path.exists() else {}
    now = {"device": environment()["device"], **versions()}
    return found["results"] if found.get("environment", {}).items() >= now.items() else {}


def _path(name: str, folder: pathlib.Path) -> pathlib.Path:
    return folder / f"{name}_{jax.default_backend()}.json"
