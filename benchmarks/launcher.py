"""What `python -m mpjax run` costs, and what it does to scripts: `python -m benchmarks.launcher`.

- Start-up: the CPU time of processes that import JAX, Flax and optax, with and without the launcher, alternately.
- Step: the CPU time of a step of an unmodified script, over that of the same step written with mpjax's API,
  alternately in one process.
- Scripts of others, `--foreign FOLDER`: the folder holds fetched repositories (`jax`, `flax`, `optax`, ...).
  `benchmarks/foreign_scripts` names the scripts of them that run here, unmodified, on tiny data. Run again, the command
  continues an interrupted table: it keeps the rows that are right and were measured with the same code.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import RESULTS

ROOT = pathlib.Path(__file__).parent.parent
PARTS = ("startup", "step")
IMPORTS = "import jax, flax.linen, flax.nnx, optax\n"


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


def table(results: dict[str, Any]) -> str:
    """Markdown: all measured parts."""
    lines = []
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


def run_foreign(folder: pathlib.Path, names: Sequence[str], out: pathlib.Path) -> None:
    """Runs scripts of fetched repositories, and merges the results into a file of their own, row by row."""
    from benchmarks.foreign_scripts import scripts
    from perf.results import save

    path = out / "launcher_foreign_cpu.json"
    rows = json.loads(path.read_text())["results"] if path.exists() else {}
    for name in names:
        script = scripts.SCRIPTS[name]
        code = scripts.code_of(script)
        is_kept = name in rows and rows[name]["code"] == code and scripts.verdict(rows[name]) == "yes"
        if not is_kept and (folder / script.path).exists():
            rows[name] = {"code": code, **scripts.row_of(folder, script)}
            rows = {name: rows[name] for name in scripts.SCRIPTS if name in rows}
            save("launcher_foreign", rows, out).with_suffix(".md").write_text(scripts.table(rows))
    print(scripts.table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--scripts", nargs="+", metavar="NAME", help="only these scripts of others")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of the steps")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--foreign", type=pathlib.Path, metavar="FOLDER", help="run others' repositories in it instead")
    args = parser.parse_args()
    if args.foreign:
        from benchmarks.foreign_scripts.scripts import SCRIPTS

        run_foreign(args.foreign, args.scripts or list(SCRIPTS), args.out)
        return
    from perf.results import previous, save

    results = {part: found for part, found in previous("launcher", args.out).items() if part in PARTS}

    def write() -> None:
        path = save("launcher", results, args.out)
        path.with_suffix(".md").write_text(table(results))

    if "startup" in args.parts:
        results["startup"] = measure_startup(7)
        write()
    if "step" in args.parts:
        results["step"] = measure_step(args.rounds)
        write()
    print(table(results))


if __name__ == "__main__":
    main()
