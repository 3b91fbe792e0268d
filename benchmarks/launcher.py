"""What `python -m mpjax run` costs, and what it does to scripts: `python -m benchmarks.launcher`.

- Start-up: the CPU time of processes that import JAX, Flax and optax, with and without the launcher, alternately.
- First call: the CPU time to trace and compile a step, over that of plain JAX, alternately in one process; also of the
  step with mpjax's API, and of a model that is written in float16.
- Eager gradients: the same for `jax.grad` outside of `jax.jit`.
- Step: the CPU time of a step of an unmodified script, over that of the same step written with mpjax's API.
- Scripts of others, `--foreign FOLDER`: the folder holds fetched repositories (`jax`, `flax`, `optax`, ...).
  `benchmarks/foreign_scripts` names the scripts of them that run here, unmodified, on tiny data. Run again, the command
  continues an interrupted table: it keeps the rows that are right and were measured with the same code, or with code
  that gave the same programs.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import commands
from perf.results import previous
from perf.timing import interleaved, ratios

ROOT = pathlib.Path(__file__).parent.parent
PARTS = ("startup", "compile", "eager", "step")
PERCEPTRON, API = "perceptron", "mpjax's API"
PROGRAMS = (PERCEPTRON, "linen_transformer", "linen_unet")
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


Maker = Callable[[], Callable[[], Any]]


def forms(name: str) -> dict[str, Maker]:
    """Makers of a training step: each compiles the step, calls it, and returns a function that calls it again."""
    import jax
    import optax

    import mpjax
    from testing.models.zoo import REGISTRY, harness

    by_hand = None if name == PERCEPTRON else REGISTRY[name].handwritten(jax.numpy.float16)
    loss_fn, params, batch = perceptron() if name == PERCEPTRON else harness.concrete(name)

    def maker(tx: Any, grads_of: Callable[..., Any], policy: str = "") -> Maker:
        def make() -> Callable[[], Any]:
            with launched(policy) if policy else contextlib.nullcontext():
                optimizer = tx()
                carried = [params, optimizer.init(params)]

                @jax.jit
                def step(params: Any, state: Any) -> Any:
                    loss, grads = grads_of(params, state)
                    updates, state = optimizer.update(grads, state, params)
                    return optax.apply_updates(params, updates), state, loss

                def call() -> Any:
                    carried[0], carried[1], loss = step(*carried)
                    return jax.block_until_ready((carried[0], loss))

                call()
                return call

        return make

    def adam() -> Any:
        return optax.adam(1e-3)

    def plain(p: Any, s: Any) -> Any:
        return jax.value_and_grad(loss_fn)(p, batch)

    cast = mpjax.autocast(loss_fn)
    found = {
        "plain": maker(adam, plain),
        "launcher": maker(adam, plain, "mixed_float16"),
        "launcher, bfloat16": maker(adam, plain, "mixed_bfloat16"),
        API: maker(lambda: mpjax.dynamic_loss_scale(adam()), lambda p, s: mpjax.value_and_grad(cast, s)(p, batch)),
    }
    if by_hand is not None:
        found["written in float16"] = maker(adam, lambda p, s: jax.value_and_grad(by_hand)(p, batch))
    return found


def perceptron(width: int = 256, rows: int = 512) -> tuple[Any, Any, Any]:
    """A loss function, its params and its batch."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]

    def loss_fn(params: Any, x: Any) -> Any:
        for w in params[:-1]:
            x = jax.nn.relu(x @ w)
        return jnp.mean((x @ params[-1]) ** 2)

    return loss_fn, params, jax.random.normal(keys[0], (rows, width))


@contextlib.contextmanager
def launched(policy: str) -> Iterator[None]:
    """JAX and optax as a launched script sees them."""
    from mpjax.launcher import hooks
    from mpjax.launcher.options import Options

    patches = hooks.patch(Options(policy=policy, quiet=True))
    try:
        yield
    finally:
        patches.undo()


def measure_compile(rounds: int) -> dict[str, Any]:
    """The time of the first call of a step, which traces and compiles it, over that in float32."""
    return {name: _ratios(dict(forms(name)), rounds, "plain") for name in PROGRAMS}


def measure_eager(rounds: int) -> dict[str, Any]:
    """The time of a gradient outside of `jax.jit`, over that without the launcher."""
    import jax
    import optax

    loss_fn, params, batch = perceptron(width=32, rows=32)
    results = {}
    for name, compiled in ("loss", False), ("compiled loss", True):
        runs = {}
        for form in "plain", "launcher":
            with launched("mixed_float16") if form == "launcher" else contextlib.nullcontext():
                optax.adam(1e-3)
                gradient = jax.grad(jax.jit(loss_fn) if compiled else loss_fn)
                gradient(params, batch)
            runs[form] = functools.partial(gradient, params, batch)
        results[name] = _ratios(runs, rounds, "plain")
    return results


def measure_step(rounds: int) -> dict[str, Any]:
    """The time of a step under the launcher, over that of the same step with mpjax's API."""
    return {
        name: _ratios({form: make() for form, make in forms(name).items() if form in (API, "launcher")}, rounds, API)
        for name in PROGRAMS
    }


def _ratios(runs: Mapping[str, Callable[[], Any]], rounds: int, base: str) -> dict[str, Any]:
    # Other processes disturb CPU seconds less than the wall time.
    return ratios(interleaved(runs, rounds, warmup=1, clock=time.process_time), base)


def table(results: dict[str, Any]) -> str:
    """Markdown: all measured parts. Times are CPU time."""
    lines = []
    if startup := results.get("startup"):
        low, high = startup["more_quartiles"]
        lines.append(
            f"Start-up: {startup['more']:.2f} s more ({low:.2f} to {high:.2f}) than the {startup['plain']:.2f} s that "
            "plain Python takes to import JAX, Flax and optax."
        )
    titles = {
        "compile": ("The first call of a step, which traces and compiles it", "plain"),
        "eager": ("A gradient outside of `jax.jit`", "plain"),
        "step": ("A step", API),
    }
    for part, (title, base) in titles.items():
        if part in results:
            rows = []
            for name, row in results[part].items():
                cells = (f"{form} {commands.with_quartiles(found)}" for form, found in row.items() if form != base)
                rows.append((name, f"{row[base]['milliseconds']:.3g}", "; ".join(cells)))
            lines += ["", f"{title}:", "", commands.markdown(("", f"{base}, ms", "over it"), rows).rstrip()]
    return (
        "\n".join([*lines, "", "All times are CPU times, ratios medians (quartiles) of rounds in one process."]) + "\n"
    )


def run_foreign(folder: pathlib.Path, names: Sequence[str], out: pathlib.Path) -> None:
    """Runs scripts of fetched repositories, and merges the results into a file of their own, row by row."""
    from benchmarks.foreign_scripts import scripts

    rows = previous("launcher_foreign", out)
    for name in names:
        script, row = scripts.SCRIPTS[name], rows.get(name)
        right = row if row is not None and scripts.verdict(row) == "yes" else None
        is_current = right and right["code"] == scripts.code() and right["script"] == scripts.entry_of(script)
        if not is_current and (folder / script.path).exists():
            rows[name] = (right and scripts.kept(folder, script, right)) or scripts.row_of(folder, script)
            rows = {name: rows[name] for name in scripts.SCRIPTS if name in rows}
            commands.publish("launcher_foreign", rows, scripts.table(rows), out)
    print(scripts.table(rows))


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--scripts", nargs="+", metavar="NAME", help="only these scripts of others")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of the steps")
    parser.add_argument("--foreign", type=pathlib.Path, metavar="FOLDER", help="run others' repositories in it instead")
    args = parser.parse_args()
    if args.foreign:
        commands.refuse(parser, args, "--parts --rounds", "with --foreign")
    else:
        commands.refuse(parser, args, "--scripts", "without --foreign")
    if args.parts == ["startup"]:
        commands.refuse(parser, args, "--rounds", "on the part startup")
    if args.foreign:
        from benchmarks.foreign_scripts.scripts import SCRIPTS

        run_foreign(args.foreign, args.scripts or list(SCRIPTS), args.out)
        return
    results = {part: found for part, found in previous("launcher", args.out).items() if part in PARTS}

    measures = {
        "startup": lambda: measure_startup(7),
        "compile": lambda: measure_compile(max(args.rounds // 25, 2)),
        "eager": lambda: measure_eager(args.rounds),
        "step": lambda: measure_step(args.rounds),
    }
    for part in args.parts:
        results[part] = measures[part]()
        commands.publish("launcher", results, table(results), args.out)
    print(table(results))


if __name__ == "__main__":
    main()
