"""All benchmarks that need a GPU, the most informative first: repeat `python -m benchmarks.gpu` until it is done.

A call takes at most `--budget` seconds. A file in the folder of the results records the finished steps, and the next
call continues after them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

from benchmarks import CACHE, RESULTS

NOTES = "gpu_run.json"
# Exit status of a command that has more to do: sysexits.h's EX_TEMPFAIL.
MORE_TO_DO = 75


@dataclasses.dataclass(frozen=True)
class Step:
    """A `python -m` command. It starts only with `least` seconds left and is stopped after `most`."""

    name: str
    arguments: tuple[str, ...]
    least: int
    most: int
    takes_limit: bool = False
    writes: bool = True


STEPS = (
    Step("tests", ("pytest", "-m", "gpu", "-q", "-o", "addopts=", "tests"), 60, 240, writes=False),
    Step("quick training", ("benchmarks.training", "--quick"), 60, 3600, takes_limit=True),
    Step("loss scaling", ("benchmarks.loss_scaling", "--dtypes", "float16", "float32"), 120, 480),
    Step("full training", ("benchmarks.training", "--full"), 60, 3600, takes_limit=True),
    Step("largest batches", ("benchmarks.training", "--quick", "--largest-batch"), 120, 3600, takes_limit=True),
)


def run(step: Step, out: pathlib.Path, left: float) -> str:
    """Runs a step within the remaining seconds; returns "done", "more to do" or the failure."""
    limit = min(step.most, left)
    command = [sys.executable, "-m", *step.arguments]
    command += ["--out", str(out)] if step.writes else []
    command += ["--time-limit", str(max(int(limit) - 30, 1))] if step.takes_limit else []
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    print(f"{step.name}: {' '.join(command)}", flush=True)
    try:
        status = subprocess.run(command, timeout=limit, env=environment).returncode
    except subprocess.TimeoutExpired:
        # A command that keeps its finished cells continues next time; any other would time out again.
        return "more to do" if step.takes_limit else f"took more than {limit:.0f} s"
    if status == MORE_TO_DO:
        return "more to do"
    return "done" if status == 0 else f"failed with exit status {status}"


def go_on(steps: tuple[Step, ...], out: pathlib.Path, budget: float) -> dict[str, str]:
    """Runs the unfinished steps within the budget; returns the state of every step."""
    out.mkdir(parents=True, exist_ok=True)
    notes = out / NOTES
    found: dict[str, str] = json.loads(notes.read_text()) if notes.exists() else {}
    begun = time.monotonic()
    for step in steps:
        left = budget - (time.monotonic() - begun)
        if found.get(step.name) == "done" or left < step.least:
            continue
        found[step.name] = run(step, out, left)
        notes.write_text(json.dumps(found, indent=2) + "\n")
    return {step.name: found.get(step.name, "not begun") for step in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path(os.environ.get("OUT", RESULTS))
    parser.add_argument("--out", type=pathlib.Path, default=default, help="folder of the results ($OUT if set)")
    parser.add_argument("--budget", type=float, default=560, help="seconds of this call")
    args = parser.parse_args()
    # In another process, because a process with JAX on the GPU holds most of its memory.
    platform = subprocess.check_output([sys.executable, "-c", "import jax; print(jax.default_backend())"], text=True)
    if platform.strip() != "gpu":
        raise SystemExit(f"no GPU here, JAX has a {platform.strip()}: see python -m benchmarks.training --dry-run")
    found = go_on(STEPS, args.out, args.budget)
    subprocess.run([sys.executable, "-m", "benchmarks.report", "--out", str(args.out)], check=True)
    for name, state in found.items():
        print(f"{name}: {state}")
    print("all is done" if set(found.values()) == {"done"} else "give the command again for the rest")


if __name__ == "__main__":
    main()
