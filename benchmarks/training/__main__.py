"""Speed and memory of training steps, model by model and precision by precision: `python -m benchmarks.training`.

Each cell is measured in its own process, so that its peak memory on a GPU is separate. Results are written at once, so
the same command continues an interrupted run. `--toy` runs tiny models on a CPU, one process for each model, to show
that everything works; its times mean nothing. `--dry-run` compiles every cell at full size for `--target`, without
arrays and without the device, with JAX's CUDA plugin or libtpu; without them it only lowers the cells. It keeps the
rows of programs that have not changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from benchmarks import CACHE, commands
from benchmarks.gpu import INCOMPLETE
from mpjax.planning.target import TARGETS
from perf.environment import commit, versions
from testing.models.published import WORKLOADS

from .cells import Cell, Results
from .configurations import CONFIGURATIONS, PLANNED, flops_per_example
from .dry_run import dry_run
from .tables import dry_run_table, table
from .variants import VARIANTS
from .worker import shortened

QUICK_MODELS = ("resnet50", "bert_base_128", "gpt2_medium", "lstm_lm")
QUICK = ("float32", "tf32", "flax_float16", "autocast_float16", "with_policy_float16")
VARIED = ("flax_bfloat16", "autocast_bfloat16")
# Compiled for TPUs. "tf32" is JAX's default precision, one bfloat16 pass there.
ON_TPU = ("bert_base_128", "vit_b16", "gpt2_medium", "lstm_lm", "resnet50", "deep_speech_2")
ON_TPU_CELLS = ("tf32", "flax_bfloat16", "autocast_bfloat16")
_LAYERS = ("scan", "scan_remat")
ON_TPU_FORMS = {"bert_base_128": _LAYERS, "vit_b16": _LAYERS, "gpt2_medium": _LAYERS, "lstm_lm": ("no_loop",)}
ON_TPU_WAYS = ("with_policy_bfloat16", *(name for name, made in PLANNED.items() if made.state))
WITH_WAYS = ("gpt2_medium", "bert_base_128")


def selected_cells(args: argparse.Namespace) -> list[Cell]:
    """The cells that the arguments select; the baselines come first."""
    if args.dry_run and TARGETS[args.target].chips and not args.cells:
        return tpu_cells(args.only or ON_TPU)
    models = args.only or (QUICK_MODELS if args.quick else tuple(WORKLOADS))
    if args.toy and not args.only:
        models = distinct_toys(models)
    names: list[str] = args.cells or list(QUICK if args.quick else CONFIGURATIONS)
    cells = [cell for cell in (Cell.parse(model, name) for model in models for name in names) if cell.applies()]
    if args.variants or (not args.quick and not args.cells):
        varied = [f"{name}+{variant}" for variant in VARIANTS for name in VARIED]
        cells += [cell for model in models for cell in (Cell.parse(model, n) for n in varied) if cell.applies()]
    return cells


def tpu_cells(models: Iterable[str]) -> list[Cell]:
    """The cells of each model, then those of its other forms, then those of other ways to get half precision."""
    models = tuple(models)
    cells = [Cell(model, name) for model in models for name in ON_TPU_CELLS]
    cells += [Cell(model, n, form) for model in models for form in ON_TPU_FORMS.get(model, ()) for n in ON_TPU_CELLS]
    return cells + [Cell(model, name) for model in WITH_WAYS if model in models for name in ON_TPU_WAYS]


def distinct_toys(models: tuple[str, ...]) -> tuple[str, ...]:
    """The models, without duplicates at toy size."""
    firsts = {WORKLOADS[model].toy(): model for model in reversed(models)}
    return tuple(model for model in models if model in firsts.values())


def environment_of(toy: bool) -> dict[str, str]:
    """A worker's environment, with a cache of compiled programs."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    if toy:
        # Compiles in a third of the time. A toy's speed means nothing. Its compilation is measured, so it has no cache.
        del env["JAX_COMPILATION_CACHE_DIR"]
        fast = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "OMP_NUM_THREADS": "1"}
        env = {**fast, **env, "JAX_PLATFORMS": "cpu"}
    return env


def run_worker(model: str, cells: list[Cell], args: argparse.Namespace, *options: str) -> Iterator[tuple[str, Any]]:
    """Runs a worker and yields its rows as they arrive. A cell without a row gets the last line of its error output."""
    worker = [sys.executable, "-m", "benchmarks.training.worker", model]
    command = [*worker, *(cell.name for cell in cells), *options, *["--toy"] * args.toy]
    missing = [cell.name for cell in cells] or [model]
    lines: list[str] = []
    with subprocess.Popen(
        ["timeout", str(args.cell_limit * len(missing)), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment_of(args.toy),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"cell": '):
                found = json.loads(line)
                missing.remove(found["cell"])
                yield found["cell"], found["row"]
            elif line.strip():
                lines.append(line.strip())
    reason = f"took more than {args.cell_limit} s" if process.returncode == 124 else "".join(lines[-1:])[:300]
    for name in missing:
        yield name, {"error": reason or f"exit status {process.returncode}"}


def is_done(row: dict[str, Any]) -> bool:
    """Whether a cell was measured with these versions."""
    return "error" not in row and "milliseconds" in row and row["versions"] == versions()


def open_results(args: argparse.Namespace) -> Results:
    """The results to add to; measures the matmul peak first, which identifies the machine."""
    ((_, peak),) = run_worker("matmul_peak", [], args)
    if "error" in peak:
        raise SystemExit(f"the matmul peak cannot be measured: {peak['error']}")
    environment = peak.pop("environment")
    on_gpu = environment["platform"] == "gpu"
    if not on_gpu and not args.toy:
        raise SystemExit("no GPU: use --toy for tiny models on a CPU, or --dry-run")
    results = Results(args.out / ("training_gpu.json" if on_gpu and not args.toy else "training_cpu_toy.json"))
    before = results.content["environment"].get("device", environment["device"])
    if before != environment["device"]:
        raise SystemExit(f"{results.path} has results of {before}, not of {environment['device']}: use another --out")
    environment["command"] = "python -m benchmarks.training --full" + " --toy" * args.toy
    results.content |= {"environment": environment, "matmul_peak": peak, "toy": args.toy}
    results.write()
    return results


def measure_all(cells: list[Cell], results: Results, args: argparse.Namespace) -> bool:
    """Measures the missing cells until the time limit; returns whether all are measured."""
    todo = [cell for cell in cells if args.again or not is_done(results.row(cell))]
    longest, start = 0.0, time.monotonic()
    for group in groups(todo, together=args.toy):
        if args.time_limit and time.monotonic() - args.started + longest > args.time_limit:
            print(
                f"time limit reached at {group[0].model} {group[0].name}; it and later cells remain",
                file=sys.stderr,
            )
            return False
        model = group[0].model
        flops = results.content.setdefault("flops_per_example", {})
        if model not in flops:
            flops[model] = flops_per_example(Cell(model, "float32").workload(args.toy))
        options = ["--seconds", str(args.seconds), *["--profile"] * (not args.toy)]
        start = time.monotonic()
        for name, row in run_worker(model, group, args, *options):
            results.add(Cell.parse(model, name), row)
            shown = row.get("error") or f"{row.get('milliseconds')}"
            print(f"{time.monotonic() - args.started:6.0f} s  {model} {name}: {shown}", file=sys.stderr)
        longest = max(longest, time.monotonic() - start)
    return True


def groups(cells: list[Cell], together: bool) -> list[list[Cell]]:
    """The cells of each process: one, or all of a model if memory is not measured."""
    if not together:
        return [[cell] for cell in cells]
    by_model: dict[str, list[Cell]] = {}
    for cell in cells:
        by_model.setdefault(cell.model, []).append(cell)
    return list(by_model.values())


def dry_run_cells(cells: list[Cell], args: argparse.Namespace) -> None:
    """Compiles the missing cells for the target, or lowers them if they cannot be compiled."""
    target = TARGETS[args.target]
    found = target.devices()
    device = found[0] if found else None
    # A program from the cache would have no compile time.
    jax.config.update("jax_enable_compilation_cache", False)
    name = "training_dry_run" + f"_{args.target}" * (args.target != "h200") + "_toy" * args.toy
    results = Results(args.out / f"{name}.json")
    results.content["environment"] = {
        "device": f"{target.name} (compiled for, not run on)",
        "command": f"python -m benchmarks.training --dry-run --target {args.target}" + " --toy" * args.toy,
        **versions(),
        **target.versions(),
        **commit(),
    }

    for cell in cells:
        if args.time_limit and time.monotonic() - args.started > args.time_limit:
            print(f"time limit reached before {cell.model} {cell.name}", file=sys.stderr)
            break
        try:
            row = dry_run(cell, args.toy, target, device, {} if args.again else results.row(cell))
        except Exception as error:  # a cell's error is its result
            row = {"error": shortened(error)}
        results.replace(cell, row)
        print(f"{time.monotonic() - args.started:6.0f} s  {cell.model} {cell.name}: {row}", file=sys.stderr)
        jax.clear_caches()
    if device is None:
        print(f"The cells were lowered but not compiled: {target.missing}.", file=sys.stderr)
    text = dry_run_table(results.content, target)
    results.path.with_suffix(".md").write_text(text)
    print(text)


def parser() -> argparse.ArgumentParser:
    parser = commands.parser(__doc__)
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK_MODELS)}: {', '.join(QUICK)}")
    which.add_argument("--full", action="store_true", help="all models, configurations and variants; the default")
    add("--only", nargs="+", metavar="MODEL", choices=list(WORKLOADS), help="run only these models")
    add("--cells", nargs="+", metavar="CELL", help="run only these: CONFIGURATION or CONFIGURATION+VARIANT")
    add("--variants", action="store_true", help=f"also run the variants: {', '.join(VARIANTS)}")
    add("--toy", action="store_true", help="tiny models on a CPU; their times mean nothing")
    add("--dry-run", action="store_true", help="compile at full size for --target, without the device")
    add("--target", default="h200", choices=list(TARGETS), help="the device of --dry-run (default: h200)")
    add("--again", action="store_true", help="repeat finished measurements")
    add("--seconds", type=float, help="measuring time of a cell (default: 3; 0.1 with --toy)")
    add("--cell-limit", type=int, default=240, help="time limit of a cell in seconds")
    add("--time-limit", type=float, help="start no cell after this many seconds")
    return parser


def parsed() -> argparse.Namespace:
    """The arguments. Ends with an error if one has no effect."""
    made = parser()
    args = made.parse_args()
    if args.dry_run:
        commands.refuse(made, args, "--seconds --cell-limit", "with --dry-run")
        if TARGETS[args.target].chips and not args.cells:
            commands.refuse(made, args, "--quick --full --variants", f"with --target {args.target}")
    else:
        commands.refuse(made, args, "--target", "without --dry-run")
    if args.cells:
        commands.refuse(made, args, "--full" + " --quick" * bool(args.only), "with --cells")
    return args


def main() -> None:
    args = parsed()
    # This process only starts the workers and counts FLOPs from shapes; it leaves the GPU's memory to them.
    jax.config.update("jax_platforms", "cpu")
    args.started = time.monotonic()
    args.seconds = args.seconds or (0.1 if args.toy else 3.0)
    cells = selected_cells(args)
    if args.dry_run:
        dry_run_cells(cells, args)
        return
    results = open_results(args)
    complete = measure_all(cells, results, args)
    text = table(results.content)
    results.path.with_suffix(".md").write_text(text)
    print(text)
    if not complete:
        raise SystemExit(INCOMPLETE)


if __name__ == "__main__":
    main()
