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

STATE_FILE = "gpu_run.json"
# Exit status of a command that is incomplete: sysexits.h's EX_TEMPFAIL.
INCOMPLETE = 75


@dataclasses.dataclass(frozen=True)
class Step:
    """A `python -m` command. It starts only with `min_seconds` seconds left and is stopped after `max_seconds`."""

    name: str
    arguments: tuple[str, ...]
    min_seconds: int
    max_seconds: int
    takes_limit: bool = False
    writes: bool = True


# Attention as written, fused by autocast, and by hand.
ATTENTION = ("autocast_bfloat16", "autocast_bfloat16_fused", "autocast_bfloat16+cudnn_attention")
ATTENTION_MODELS = ("gpt2_medium", "gpt2_medium_4096", "bert_large_512", "vit_l16", "t5_base")
# The widest models, in bfloat16 and in float8.
WIDEST = ("gpt2_medium", "bert_large_128")
FLOAT8 = ("autocast_bfloat16", "autocast_float8")
STEPS = (
    Step("tests", ("pytest", "-m", "gpu", "-q", "-o", "addopts=", "tests"), 60, 240, writes=False),
    Step("quick training", ("benchmarks.training", "--quick"), 60, 3600, takes_limit=True),
    Step("loss scaling", ("benchmarks.loss_scaling", "--dtypes", "float16", "float32"), 120, 480),
    Step(
        "fused attention",
        ("benchmarks.training", "--only", *ATTENTION_MODELS, "--cells", *ATTENTION),
        60,
        3600,
        takes_limit=True,
    ),
    Step("float8", ("benchmarks.training", "--only", *WIDEST, "--cells", *FLOAT8), 60, 3600, takes_limit=True),
    Step("full training", ("benchmarks.training", "--full"), 60, 3600, takes_limit=True),
)


def run(step: Step, out: pathlib.Path, left: float) -> str:
    """Runs a step within the remaining seconds; returns "done", "incomplete" or the failure."""
    limit = min(step.max_seconds, left)
    command = [sys.executable, "-m", *step.arguments]
    command += ["--out", str(out)] if step.writes else []
    command += ["--time-limit", str(max(int(limit) - 30, 1))] if step.takes_limit else []
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    print(f"{step.name}: {' '.join(command)}", flush=True)
    try:
        status = subprocess.run(command, timeout=limit, env=environment).returncode
    except subprocess.TimeoutExpired:
        # A command that keeps its finished cells continues next time; any other would time out again.
        return "incomplete" if step.takes_limit else f"took more than {limit:.0f} s"
    if status == INCOMPLETE:
        return "incomplete"
    return "done" if status == 0 else f"failed with exit status {status}"


def run_steps(steps: tuple[Step, ...], out: pathlib.Path, budget: float) -> dict[str, str]:
    """Runs the unfinished steps within the budget; returns the state of every step."""
    out.mkdir(parents=True, exist_ok=True)
    state_file = out / STATE_FILE
    states: dict[str, str] = json.loads(state_file.read_text()) if state_file.exists() else {}
    start = time.monotonic()
    for step in steps:
        left = budget - (time.monotonic() - start)
        if states.get(step.name) == "done" or left < step.min_seconds:
            continue
        states[step.name] = run(step, out, left)
        state_file.write_text(json.dumps(states, indent=2) + "\n")
    return {step.name: states.get(step.name, "not started") for step in steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = pathlib.Path(os.environ.get("OUT", RESULTS))
    parser.add_argument("--out", type=pathlib.Path, default=default, help="folder of the results ($OUT if set)")
    parser.add_argument("--budget", type=float, default=560, help="time limit of this call in seconds")
    args = parser.parse_args()
    # In another process, because a process with JAX on the GPU holds most of its memory.
    platform = subprocess.check_output([sys.executable, "-c", "import jax; print(jax.default_backend())"], text=True)
    if platform.strip() != "gpu":
        raise SystemExit(f"no GPU: JAX runs on {platform.strip()}; see python -m benchmarks.training --dry-run")
    states = run_steps(STEPS, args.out, args.budget)
    subprocess.run([sys.executable, "-m", "benchmarks.report", "--out", str(args.out)], check=True)
    for name, state in states.items():
        print(f"{name}: {state}")
    print("all steps are done" if set(states.values()) == {"done"} else "run the command again to continue")


if __name__ == "__main__":
    main()
