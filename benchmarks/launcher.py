"""The effect of `python -m mpjax run` on scripts, and its cost: `python -m benchmarks.launcher`.

- Scripts: each of `tests/launcher/scripts` in float32 with three seeds, in float16 with the first seed, and again with
  an initial loss scale of 2**32, which overflows. The results are the share of matmul FLOPs in half and the final
  losses. Each script has its own process, with two CPU devices and quick compilation.
- Start-up: the CPU time of processes that import JAX, Flax and optax, with and without the launcher, alternately.
- Step: the CPU time of a step of an unmodified script, over that of the same step written with mpjax's API,
  alternately in one process.

- Foreign scripts, `--foreign FOLDER`: the folder holds fetched repositories, `jax`, `flax`, `optax` and `dm-haiku`.
  `benchmarks/foreign_scripts` names the scripts of them that run here, unmodified, on tiny data.

A run merges its results into the file, so the benchmark can run in parts: `--parts step`, `--scripts gan vae`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import pathlib
import resource
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import RESULTS

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = ROOT / "tests" / "launcher" / "scripts"
SEEDS = (0, 1, 2)
OVERFLOWING_SCALE = 2.0**32
PARTS = ("scripts", "startup", "step")
FLAGS = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
IMPORTS = "import jax, flax.linen, flax.nnx, optax\n"


class Counts:
    """Counts matmul FLOPs by dtype in programs with gradients, and repeated gradients."""

    def __init__(self) -> None:
        self.half = self.all = 0
        self.steps: dict[int, Any] = {}

    def traced(self, program: Any, jaxpr: Any) -> None:
        """Counts the matmul FLOPs of a program."""
        from mpjax.launcher.calls import running_sites

        if program.differentiates:
            for site in running_sites(jaxpr):
                self.all += site.flops
                self.half += site.flops * all(v.aval.dtype.itemsize == 2 for v in site.eqn.invars[:2])

    def step_finished(self, compiled: Any) -> None:
        """Records a compiled step."""
        self.steps[id(compiled)] = compiled

    def repeated(self) -> int | None:
        """Number of gradients repeated at a lower scale; None if the step could not count them."""
        from mpjax.launcher.session import CALLS, RETRIES

        rows = [step.counts for step in self.steps.values() if step.counts is not None]
        return int(sum(r[:, RETRIES].sum() for r in rows)) if any(r[:, CALLS].any() for r in rows) else None


def run_script(name: str) -> dict[str, Any]:
    """The losses of a script in this process, in float32 and under the launcher."""
    import jax

    from mpjax.launcher import hooks
    from mpjax.launcher.options import Options

    def loss(seed: int) -> float:
        with contextlib.redirect_stdout(io.StringIO()):
            found = runpy.run_path(str(SCRIPTS / f"{name}.py"))["main"](["--seed", str(seed)])
        jax.clear_caches()
        return round(found, 5)

    def launched(scale: float) -> tuple[float, Counts]:
        counts = Counts()
        patches = hooks.patch(Options(quiet=True, init_scale=scale))
        patches.session.watchers.append(counts)
        try:
            return loss(SEEDS[0]), counts
        finally:
            patches.undo()

    losses = [loss(seed) for seed in SEEDS]
    half_loss, counts = launched(2.0**15)
    planted_loss, planted_counts = launched(OVERFLOWING_SCALE)
    return {
        "share": round(counts.half / counts.all, 4),
        "float32": losses,
        "float16": half_loss,
        "repeated": counts.repeated(),
        "planted": planted_loss,
        "planted_repeated": planted_counts.repeated(),
    }


def run_in_subprocess(name: str) -> dict[str, Any]:
    """Runs `run_script` in its own process; returns the error if the script fails."""
    command = [sys.executable, "-m", "benchmarks.launcher", "--one", name]
    environment = {**os.environ, "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def measure_startup(rounds: int) -> dict[str, Any]:
    """CPU seconds of processes that import JAX and end: plain, and under the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "script.py"
        script.write_text(IMPORTS)
        plain, launched = [sys.executable, str(script)], [sys.executable, "-m", "mpjax", "run", "--quiet", str(script)]
        cpu_seconds(plain), cpu_seconds(launched)  # compiles the bytecode
        pairs = [(cpu_seconds(plain), cpu_seconds(launched)) for _ in range(rounds)]
    overhead = [b - a for a, b in pairs]
    return {
        "plain": round(statistics.median(a for a, _ in pairs), 3),
        "launched": round(statistics.median(b for _, b in pairs), 3),
        "more": round(statistics.median(overhead), 3),
        "more_quartiles": [round(q, 3) for q in statistics.quantiles(overhead, n=4)[::2]],
    }


def cpu_seconds(command: list[str]) -> float:
    """The user and system time of a child process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_step(rounds: int, width: int = 256, batch: int = 512) -> dict[str, Any]:
    """The time of a step under the launcher, over that of the same step with mpjax's API."""
    import jax
    import jax.numpy as jnp
    import optax

    import mpjax
    from mpjax.launcher import hooks
    from mpjax.launcher.options import Options
    from perf.timing import interleaved, ratios

    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    x = jax.random.normal(keys[0], (batch, width))

    def loss_fn(params: Any, x: Any) -> Any:
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ params[-1]) ** 2)

    def step_runner(tx: Any, grads_of: Callable[..., Any]) -> Callable[[], Any]:
        carried = [params, tx.init(params)]

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            loss, grads = grads_of(params, state)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        def call() -> Any:
            carried[0], carried[1], loss = step(*carried)
            return carried[0], loss

        call()
        return call

    cast = mpjax.autocast(loss_fn)
    runs = {
        "mpjax's API": step_runner(
            mpjax.dynamic_loss_scale(optax.adam(1e-3)), lambda p, s: mpjax.value_and_grad(cast, s)(p, x)
        )
    }
    patches = hooks.patch(Options(quiet=True))
    try:
        runs["launcher"] = step_runner(optax.adam(1e-3), lambda p, s: jax.value_and_grad(loss_fn)(p, x))
    finally:
        patches.undo()
    # Other processes disturb CPU seconds less than the wall time.
    return ratios(interleaved(runs, rounds, clock=time.process_time), "mpjax's API")


def verdict(row: dict[str, Any]) -> str:
    """Whether the loss in half is no further from the same seed in float32 than seeds are from each other."""
    spread = max(row["float32"]) - min(row["float32"])
    differences = [abs(row[name] - row["float32"][0]) for name in ("float16", "planted")]
    return "yes" if all(math.isfinite(difference) and difference <= spread for difference in differences) else "**no**"


def table(results: dict[str, Any]) -> str:
    """Markdown: all measured parts."""
    lines = []
    if results.get("scripts"):
        header = (
            "share of matmul FLOPs in half | float32, three seeds | float16 | first scale 2**32 | within the spread"
        )
        lines += [f"| script | {header} |", "|---" * 6 + "|"]
        lines += [_row(name, row) for name, row in sorted(results["scripts"].items())]
        lines += [
            "",
            "Final losses; float16 has the first of the three seeds. Within the spread: both losses in float16 differ "
            "from the same seed in float32 by no more than the three seeds do. In brackets: gradients repeated "
            "at a lower loss scale, where the step counts them.",
            "",
        ]
    if startup := results.get("startup"):
        low, high = startup["more_quartiles"]
        lines.append(
            f"Start-up: {startup['more']:.2f} s more ({low:.2f} to {high:.2f}) than the {startup['plain']:.2f} s that "
            "plain Python takes to import JAX, Flax and optax (CPU time)."
        )
    if step := results.get("step"):
        low, high = step["launcher"]["ratio_quartiles"]
        lines.append(
            f"\nA step: {step['launcher']['ratio']:.3f} ({low:.3f} to {high:.3f}) of the same step written with "
            f"mpjax's API, {step[next(iter(step))]['milliseconds']} ms (CPU time)."
        )
    return "\n".join(lines) + "\n"


def _row(name: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {name} | fails: {row['error']} | | | | **no** |"

    def counted(loss: str, repeated: str) -> str:
        return f"{row[loss]:.4g}" + ("" if row[repeated] is None else f" ({row[repeated]})")

    seeds = ", ".join(f"{loss:.4g}" for loss in row["float32"])
    halves = f"{counted('float16', 'repeated')} | {counted('planted', 'planted_repeated')}"
    return f"| {name} | {row['share']:.1%} | {seeds} | {halves} | {verdict(row)} |"


def run_foreign(folder: pathlib.Path, names: list[str] | None, out: pathlib.Path) -> None:
    """Runs scripts of fetched repositories, and merges the results into a file of their own."""
    from benchmarks.foreign_scripts import scripts
    from perf.environment import versions
    from perf.results import save

    path = out / "launcher_foreign_cpu.json"

    def measured() -> dict[str, Any]:
        """The rows so far, each with the version of JAX that it ran with. Other processes may add some."""
        found = json.loads(path.read_text()) if path.exists() else {"results": {}}
        return {name: {"jax": found["environment"]["jax"], **row} for name, row in found["results"].items()}

    known = measured()
    for name in names or [name for name in scripts.SCRIPTS if name not in known]:
        if (folder / scripts.SCRIPTS[name].path).exists():
            row = {**scripts.row_of(folder, scripts.SCRIPTS[name]), "jax": versions()["jax"]}
            rows = {**measured(), name: row}
            save("launcher_foreign", rows, out).with_suffix(".md").write_text(scripts.table(rows))
    print(scripts.table(measured()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--scripts", nargs="+", help="names of scripts (default: all)")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of the steps")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--foreign", type=pathlib.Path, metavar="FOLDER", help="run others' repositories in it instead")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.foreign:
        run_foreign(args.foreign, args.scripts, args.out)
        return
    if args.one:
        print(json.dumps(run_script(args.one)))
        return
    from perf.results import previous, save

    results: dict[str, Any] = previous("launcher", args.out) or {}

    def write() -> None:
        path = save("launcher", results, args.out)
        path.with_suffix(".md").write_text(table(results))

    if "startup" in args.parts:
        results["startup"] = measure_startup(7)
        write()
    if "step" in args.parts:
        results["step"] = measure_step(args.rounds)
        write()
    for name in args.scripts or sorted(path.stem for path in SCRIPTS.glob("*.py")) if "scripts" in args.parts else ():
        results.setdefault("scripts", {})[name] = run_in_subprocess(name)
        write()
    print(table(results))


if __name__ == "__main__":
    main()
