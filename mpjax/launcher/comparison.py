"""`--compare N`: the first steps of a script in float32 and in the policy, side by side."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpjax._tables import table
from mpjax.launcher.options import POLICY, LaunchError, Options


def compare(options: Options, steps: int, command: Sequence[str]) -> int:
    """Runs the script in float32 and in the policy, and prints the losses and times of its first steps.

    Args:
        options: Options of the run in half precision.
        steps: Number of steps of each run.
        command: The script and its arguments, as on the command line of `run`.

    Returns:
        0, or the exit code of a run that failed.

    Raises:
        LaunchError: A run ended before it recorded a step.
    """
    runs: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for policy in ("float32", options.policy):
            path = Path(folder) / "steps.json"
            path.unlink(missing_ok=True)
            command_line = [sys.executable, "-m", "mpjax", "run", "--quiet", "--policy", policy]
            command_line += ["--init-scale", str(options.init_scale), "--steps", str(steps), "--record", str(path)]
            command_line += [f"--deny={pattern}" for pattern in options.deny]
            code = subprocess.call([*command_line, *command], env={k: v for k, v in os.environ.items() if k != POLICY})
            if not path.exists():
                if code:
                    return code
                raise LaunchError(f"--compare: in {policy} the script ended before a compiled training step")
            runs[policy] = json.loads(path.read_text())
    print("\n".join(_side_by_side(runs)))
    return 0


def _side_by_side(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    (first, a), (second, b) = runs.items()
    rows = [
        (f"{x['step']:.0f}", f"{x['loss']:.6g}", f"{y['loss']:.6g}", _milliseconds(x), _milliseconds(y))
        for x, y in zip(a, b, strict=False)
    ]
    header = ("step", f"loss, {first}", f"loss, {second}", f"ms, {first}", f"ms, {second}")
    medians = [statistics.median(t) if (t := _times(run)) else math.nan for run in (a, b)]
    ratio = f"{medians[0] / medians[1]:.3g} × as fast in {second}, by the medians of {1e3 * medians[0]:.3g} ms and "
    return [*table(header, rows, right={0, 1, 2, 3, 4}), "", f"{ratio}{1e3 * medians[1]:.3g} ms a step"]


def _times(run: list[dict[str, Any]]) -> list[float]:
    return [row["seconds"] for row in run if not math.isnan(row["seconds"])]


def _milliseconds(row: dict[str, Any]) -> str:
    return "compiles" if math.isnan(row["seconds"]) else f"{1e3 * row['seconds']:.3g}"
