"""The launcher's options, and the environment variables that carry them to child processes."""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = "python -m mpjax run"
POLICY = "MPJAX_AUTOCAST_ALL"
DETAILS = "MPJAX_AUTOCAST_ALL_OPTIONS"
DEFAULT_POLICY = "mixed_float16"

_LISTS = ("allow", "deny", "infer", "packages")


class LaunchError(SystemExit):
    """A mistake in the call of the launcher. It ends the process even past a script's `except Exception`."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `run`.

    Args:
        policy: A policy's name or string, as for `mpjax.get_policy`.
        allow, deny, infer: Entries for the lists of `mpjax.Rules`.
        attention: As in `mpjax.Rules`.
        overrides: `(pattern, policy)` pairs over module paths.
        packages: Installed packages whose gradients count as the script's own.
        any_gradient: Whether gradients are cast that no optimizer receives, in bfloat16: the script updates by hand.
        evaluations: Whether evaluations are cast whose results the script may use for anything.
        init_scale: The first loss scale.
        quiet: Whether to print only errors.
        explain: Path of a file for the plan of each differentiated function, or "".
        dry_run: Whether to print the audit at the first compiled step and exit.
    """

    policy: str = DEFAULT_POLICY
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    infer: Sequence[str] = ()
    attention: str = "auto"
    overrides: Sequence[Sequence[str]] = ()
    packages: Sequence[str] = ()
    any_gradient: bool = False
    evaluations: bool = False
    init_scale: float = 2.0**15
    quiet: bool = False
    explain: str = ""
    dry_run: bool = False

    def environment(self) -> dict[str, str]:
        """The environment variables that pass these options to a child process."""
        details = dataclasses.asdict(self)
        return {POLICY: details.pop("policy"), DETAILS: json.dumps(details)}


def from_environment() -> Options | None:
    """Reads the options from the environment; None without `MPJAX_AUTOCAST_ALL`.

    Raises:
        LaunchError: `MPJAX_AUTOCAST_ALL_OPTIONS` is invalid.
    """
    policy = os.environ.get(POLICY, "").strip()
    if not policy:
        return None
    try:
        return Options(policy=policy, **json.loads(os.environ.get(DETAILS, "{}")))
    except (ValueError, TypeError) as error:
        raise LaunchError(f"{DETAILS}={os.environ.get(DETAILS)!r} can not be read: {error}") from error


def read_rules(path: str) -> dict[str, Any]:
    """Reads the fields of `Options` that a rules file sets.

    The file is TOML::

        allow = ["dot_general"]
        deny = ["*/head"]
        infer = ["reduce_max"]
        packages = ["my_trainer"]

        [overrides]
        "*/LayerNorm_*" = "float32"

    Raises:
        LaunchError: The file cannot be read, or has other entries.
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LaunchError(f"--rules {path}: {error}") from error
    fields: dict[str, Any] = {}
    for key, value in content.items():
        if key in _LISTS and isinstance(value, list) and all(isinstance(x, str) for x in value):
            fields[key] = value
        elif key == "overrides" and isinstance(value, dict) and all(isinstance(x, str) for x in value.values()):
            fields[key] = tuple(value.items())
        else:
            raise LaunchError(
                f"--rules {path}: {key} = {value!r} is not understood. The file may have the lists of strings "
                "allow, deny, infer and packages, and a table [overrides] of 'pattern' = 'policy'."
            )
    return fields
