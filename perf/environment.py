"""The environment of a result, and whether a result is still current."""

from __future__ import annotations

import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
from typing import Any

import jax

import mpjax


def versions() -> dict[str, str]:
    """The software versions recorded with a result; it is stale under other versions."""
    return {"jax": jax.__version__, "mpjax": mpjax.__version__}


def environment(without: dict[str, int | None] | None = None) -> dict[str, Any]:
    """Device, versions, commit and command of this process.

    Args:
        without: Options that do not affect results, which are left out of the command. Maps each name to its number of
            values (None: all up to the next option).
    """
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "device": device.device_kind if device.platform != "cpu" else f"CPU, {os.cpu_count()} cores",
        "platform_version": device.client.platform_version.splitlines()[0],
        **(_driver() if device.platform == "gpu" else {}),
        **versions(),
        **commit(),
        "python": platform.python_version(),
        "command": f"python -m {_module_name()} {shlex.join(_arguments(without or {}))}".strip(),
    }


def commit() -> dict[str, str]:
    """The commit of mpjax's checkout, and whether the package has changed since; empty if it is installed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(pathlib.Path(mpjax.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    if not shutil.which("git") or not git("ls-files", "__init__.py"):
        return {}
    return {"commit": git("rev-parse", "--short=8", "HEAD") + (" with changes" if git("status", "-s", ".") else "")}


def _driver() -> dict[str, str]:
    """The version of NVIDIA's driver, where its tool is installed."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {"driver": subprocess.check_output(query, text=True).splitlines()[0]} if shutil.which(query[0]) else {}


def _arguments(without: dict[str, int | None]) -> list[str]:
    kept, skipped = [], 0
    for argument in sys.argv[1:]:
        if argument.startswith("--"):
            values = without.get(argument, 0)
            skipped = len(sys.argv) if values is None else values
            if argument in without:
                continue
        elif skipped:
            skipped -= 1
            continue
        kept.append(argument)
    return kept


def _module_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else pathlib.Path(sys.argv[0]).stem
