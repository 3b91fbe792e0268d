"""The time that loss scaling adds to a step: `python -m benchmarks.loss_scaling`.

Adam on an MLP with float32 parameters, with and without donated buffers; the libraries' loss scaling runs interleaved
in one process. The compute-bound step has a large batch. The parameter-bound step has a batch of 4, so that the
optimizer takes most of it. `python -m benchmarks.faults` shows which of these libraries are correct.

A step that can skip holds all gradients before its first update, so it needs more temporary memory. On a CPU XLA
allocates that memory with malloc at each step, and glibc returns blocks of this size to the system at once: the page
faults then cost more than loss scaling itself. Accelerators use a pool, so by default this benchmark runs with a malloc
that keeps its memory; `--system-malloc` uses the system's default.

On a CPU a step's time is the CPU time of all threads of the process, which other processes disturb less than the wall
time.

With half matmuls, the purpose of loss scaling, unscaling is fused into the cast of the gradients to float32; with
float32 matmuls it is a separate pass.

A ratio below 1 is an effect of XLA's CPU compiler. It leaves the gradient of a weight transposed in memory, which slows
both loops of Adam that read it. The operands of `lax.cond`, in which mpjax skips steps, are stored in row-major order
instead. "gradients in row-major layout" is the step without loss scaling in that layout, a fairer baseline.

A run merges its results into the file, so the benchmark can run in parts.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import commands, sharded_steps
from benchmarks.loss_scaling_forms import Form, Loss, forms
from perf.results import previous
from perf.timing import interleaved, ratios

# Width of the layers, and batch of the compute-bound step: 8.4 million parameters for a CPU, 268 million for a GPU.
SIZES = {"cpu": ((512, 2048, 2048, 1024, 1024), 256), "gpu": ((8192,) * 5, 8192)}
BOUND = ("compute-bound", "parameter-bound")
DTYPES = ("float32", "bfloat16", "float16")
DONATED = {"donated": True, "not donated": False}

# glibc reads these when a process starts.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "400000000",
    "MALLOC_ARENA_MAX": "1",
}

Row = dict[str, Any]
Compile = Callable[[Form, Any, jax.Array, jax.Array], tuple[Any, Any]]


def init_params(widths: tuple[int, ...]) -> list[jax.Array]:
    shapes = list(itertools.pairwise(widths))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


def loss_in(dtype: str) -> Loss:
    """The loss function of the MLP, with matmuls in `dtype`."""

    def loss_fn(params: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        for w in params[:-1]:
            x = jax.nn.relu(x @ w.astype(dtype))
        return jnp.mean(((x @ params[-1].astype(dtype)).astype(jnp.float32) - y) ** 2)

    return loss_fn


def compiled(form: Form, params: Any, x: jax.Array, y: jax.Array, donate: bool) -> tuple[Any, Any]:
    """A form's step and its arguments."""
    args = (params, form.init(params), x, y)
    return jax.jit(form.step, donate_argnums=(0, 1) if donate else ()).lower(*args).compile(), args


def measure(
    widths: tuple[int, ...], batch: int, dtype: str, rounds: int, compile_step: Compile, *only: str
) -> tuple[dict[str, Row], dict[str, Any]]:
    """Step time and XLA's temporary bytes for each form, or the error of a form that fails; and the compiled steps.

    Args:
        widths, batch, dtype: Of the MLP.
        rounds: Timed rounds.
        compile_step: Compiles the step of a form; returns it with its arguments.
        *only: The names of the forms; by default all.
    """
    x = jax.random.normal(jax.random.key(1), (batch, widths[0]))
    y = jax.random.normal(jax.random.key(2), (batch, widths[-1]))
    rows: dict[str, Row] = {}
    steps: dict[str, Any] = {}
    runs: dict[str, Callable[[], Any]] = {}
    found = forms(optax.adam(1e-3), loss_in(dtype))
    for name in only or found:
        try:
            steps[name], args = compile_step(found[name], init_params(widths), x, y)
        except Exception as error:  # the row says that this peer fails
            rows[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            continue
        rows[name] = {"temporary_bytes": steps[name].memory_analysis().temp_size_in_bytes}
        runs[name] = functools.partial(_advance, steps[name], [*args])
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    for name, row in ratios(interleaved(runs, rounds, clock=clock), next(iter(runs))).items():
        rows[name] |= row
    return rows, steps


def _advance(step: Any, args: list[Any]) -> Any:
    """One step from the params and the state that the last one returned (donated buffers are gone)."""
    *args[:2], loss = step(*args)
    return args[:2], loss


def measure_sharded(widths: tuple[int, ...], dtype: str, rounds: int) -> dict[str, Row]:
    """The rows of sharded, donated steps with a small batch, and the collectives that each form adds."""
    rows, steps = measure(widths, 8, dtype, rounds, sharded_steps.compiled, *sharded_steps.FORMS)
    collectives = {name: sharded_steps.counted(step) for name, step in steps.items()}
    for name, found in collectives.items():
        rows[name]["added_collectives"] = dict(found - collectives[sharded_steps.FORMS[0]])
    return rows


def table(results: dict[str, dict[str, Row]]) -> str:
    """Markdown: the median ratio of every form to the step without loss scaling, and its quartiles."""
    names = dict.fromkeys(form for rows in results.values() for form in rows)
    lines = ([form, *(_cell(rows.get(form, {})) for rows in results.values())] for form in names)
    return commands.markdown(["step time / that without loss scaling", *results], lines)


def _cell(row: Row) -> str:
    if "ratio" not in row:
        return "fails" if "error" in row else "-"
    return commands.with_quartiles(row)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds for each step")
    parser.add_argument("--bound", nargs="+", default=list(BOUND), choices=BOUND, help="what bounds the step's time")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="dtypes of the matmuls")
    parser.add_argument("--system-malloc", action="store_true", help="use glibc's default malloc settings")
    parser.add_argument("--sharded", action="store_true", help="time sharded steps instead, on four devices")
    args = parser.parse_args()
    if args.sharded:
        commands.refuse(parser, args, "--bound", "with --sharded")
    environment = {} if args.system_malloc else dict(KEEP_MEMORY)
    if args.sharded and jax.default_backend() == "cpu":
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sharded_steps.DEVICES}"
    if not environment.items() <= os.environ.items():
        command = [sys.executable, "-m", "benchmarks.loss_scaling", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **environment})
    widths, large_batch = SIZES[jax.default_backend()]
    file = "loss_scaling" + "_sharded" * args.sharded + "_system_malloc" * args.system_malloc
    results: dict[str, dict[str, Row]] = previous(file, args.out)
    if args.sharded:
        for dtype in args.dtypes:
            name = f"sharded over {sharded_steps.DEVICES} devices, {dtype}"
            results[name] = measure_sharded(widths, dtype, args.rounds)
        commands.publish(file, results, table(results), args.out)
    for bound, dtype, donated in itertools.product(() if args.sharded else args.bound, args.dtypes, DONATED):
        batch = large_batch if bound == BOUND[0] else 4
        name = f"{bound}, {dtype}, {donated}"
        # Long steps vary less from round to round.
        rounds = args.rounds if batch == 4 else max(args.rounds // 3, 2)
        compile_step = functools.partial(compiled, donate=DONATED[donated])
        results[name], _ = measure(widths, batch, dtype, rounds, compile_step)
        print(f"{name}: { ({form: row.get('ratio') for form, row in results[name].items()}) }", file=sys.stderr)
        # An interrupted run keeps these results.
        commands.publish(file, results, table(results), args.out)
    print(table(results))


if __name__ == "__main__":
    main()
