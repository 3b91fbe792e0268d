"""How well each tool casts float32 programs to half precision: `python -m benchmarks.casting`.

Each tool runs on every program of `testing/models/zoo`. Tracing gives all columns except the gradient error. A tool
that fails on a program counts as failing, and the JSON records the error. Times are interleaved, and are ratios to the
float32 program in the same process. Compilation excludes LLVM's optimisation, which takes most of the time and does not
depend on the tool. A run merges its results into the file program by program, so the benchmark can run in parts.

The error of the gradient against float64 is divided by that of careful casts by hand: the operands of each matmul in
half, its result in float32 again, and all else in float32. NumPy evaluates both, in the program's dtypes, so the few
programs that it can't evaluate (callbacks, several devices) have none.

`--regions` compares autocast with and without rematerialisation regions, which shows their cost to the compiler:

    python -m benchmarks.casting --regions --programs linen_transformer --compilations 5

`--residuals` compares what the backward pass keeps, `half` with eight bits for one:

    python -m benchmarks.casting --residuals half int8 float8 --dtype bfloat16 --no-compile

Flax's DynamicScale casts nothing, and Keras 3 accepts only its own models, so they have no row.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, get_args

# Before JAX starts (with the imports below): some programs of the zoo run on several devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax

import mpjax
from benchmarks import commands
from benchmarks.others import with_jmp, with_mpx
from mpjax.casting.rules import Residuals
from perf.results import previous
from perf.timing import interleaved, ratios
from testing.measures import trace_time_ratio
from testing.models.zoo import REGISTRY, Program, evaluated, harness
from testing.random_programs.evaluate import Unsupported

Row = dict[str, Any]
WITHOUT_REGIONS = mpjax.Rules(residuals="full")


def casters(program: Program, regions: bool = False, residuals: Sequence[Residuals] = ()) -> dict[str, harness.Caster]:
    """The tools that apply to a program.

    With `regions`, autocast without them replaces jmp, mpx and with_policy; with `residuals`, these forms of autocast
    replace all tools.
    """
    if residuals:
        kinds = {kind: functools.partial(mpjax.autocast, rules=mpjax.Rules(residuals=kind)) for kind in residuals}
        return {"float32": harness.identity, **{f"mpjax.autocast, {kind}": cast for kind, cast in kinds.items()}}
    tools: dict[str, harness.Caster] = {
        "float32": harness.identity,
        "mpjax.autocast": mpjax.autocast,
    }
    if regions:
        tools["mpjax.autocast, no regions"] = functools.partial(mpjax.autocast, rules=WITHOUT_REGIONS)
    else:
        tools |= {"jmp": with_jmp, "mixed-precision-for-JAX": with_mpx}
    if program.flax and not regions:
        tools["mpjax.with_policy"] = lambda fun, policy: program.adapted(
            functools.partial(mpjax.with_policy, policy=policy)
        )
    if program.has_half:
        tools["hand-written"] = lambda fun, policy: program.handwritten(harness.half_of(policy))
    return tools


def measure(name: str, caster: harness.Caster, dtype: str) -> Row:
    """Every column of one tool on one program, or the error if the tool fails."""
    try:
        traced = harness.structure(name, "plain", caster, dtype)
        row: Row = {
            "half_share": round(traced.half_share, 4),
            "risky": len(traced.risky),
            "casts": traced.casts,
        }
        with contextlib.suppress(Unsupported, AssertionError):  # JAX asserts that a collective has its mesh.
            error = evaluated.gradient_error(name, caster, dtype) / evaluated.error_by_hand(name, dtype)
            row["error_of_by_hand"] = round(error, 3)
        if REGISTRY[name].differentiable:
            float32 = harness.residuals(name, harness.identity, dtype)
            row["residuals"] = round(harness.residuals(name, caster, dtype) / float32, 4)
        fun, args = harness.gradient_function(name, caster, dtype)
        with REGISTRY[name].context():
            jax.jit(lambda *args: fun(*args)).lower(*args)
        return row
    except Exception as error:  # an error of a peer is its result
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"}


def time_ratios(
    name: str, tools: dict[str, harness.Caster], dtype: str, rounds: int, compilations: int
) -> dict[str, Row]:
    """Times relative to float32: tracing the loss, and tracing the gradient (and compiling it `compilations` times)."""
    functions = {tool: harness.gradient_function(name, caster, dtype)[0] for tool, caster in tools.items()}
    loss_fn, args = harness.abstract(name)[0], harness.abstract(name)[1:]
    losses = {tool: caster(loss_fn, harness.POLICIES[dtype]) for tool, caster in tools.items()}

    def recompile(fun: Callable[..., Any]) -> None:
        jax.jit(lambda *args: fun(*args), compiler_options=harness.COMPILE_TRUE).lower(*args).compile()

    with REGISTRY[name].context():
        base = functions["float32"]
        rows: dict[str, Row] = {
            tool: {
                "trace": round(trace_time_ratio(fun, base, args, rounds), 3),
                "forward_trace": round(trace_time_ratio(losses[tool], losses["float32"], args, rounds), 3),
            }
            for tool, fun in functions.items()
        }
        if compilations:
            runs: dict[str, Callable[[], Any]] = {
                tool: functools.partial(recompile, fun) for tool, fun in functions.items()
            }
            for tool, found in ratios(interleaved(runs, compilations, warmup=0), "float32").items():
                rows[tool]["compile"] = found["ratio"]
    return rows


def run(name: str, dtype: str, rounds: int, compilations: int, tools: dict[str, harness.Caster]) -> dict[str, Row]:
    """The rows of a program by tool."""
    rows = {tool: measure(name, caster, dtype) for tool, caster in tools.items()}
    working = {tool: caster for tool, caster in tools.items() if "error" not in rows[tool]}
    for tool, times in time_ratios(name, working, dtype, rounds, compilations).items():
        rows[tool] |= times
    jax.clear_caches()
    return rows


def summary(results: dict[str, dict[str, Row]]) -> str:
    """A Markdown table with a row for each tool, over the programs that it applies to."""
    header = ["tool", "programs", "fails", "matmul FLOPs in half", "all in half", "risky in half", "casts"]
    header += ["residuals / float32", "gradient error / by hand (worst, programs)"]
    header += ["trace time", "of the loss alone", "compile time (programs)"]
    lines: list[tuple[Any, ...]] = []
    for tool in dict.fromkeys(tool for rows in results.values() for tool in rows):
        rows = [rows[tool] for rows in results.values() if tool in rows]
        passed = [row for row in rows if "error" not in row]
        if not passed:
            lines.append((tool, len(rows), len(rows), *"-" * 9))
            continue

        def median(key: str, passed: list[Row] = passed) -> str:
            values = [row[key] for row in passed if key in row]
            return f"{statistics.median(values):.2f}" if values else "-"

        shares = [row["half_share"] for row in passed]
        risky = sum(row["risky"] > 0 for row in passed)
        whole = f"{sum(share == 1 for share in shares)} of {len(passed)}"
        counts = (len(rows), len(rows) - len(passed), f"{statistics.mean(shares):.0%}", whole, f"in {risky}")
        errors = [row["error_of_by_hand"] for row in passed if "error_of_by_hand" in row]
        accuracy = median("residuals"), f"{median('error_of_by_hand')} ({_worst(errors)}, {len(errors)})"
        times = (median("trace"), median("forward_trace"))
        compiled = f"{median('compile')} ({sum('compile' in row for row in passed)})"
        lines.append((tool, *counts, median("casts"), *accuracy, *times, compiled))
    return commands.markdown(header, lines)


def _worst(errors: list[float]) -> str:
    # NaN (an overflow) is worse than any number, but `max` would ignore it.
    if not errors:
        return "-"
    return "not finite" if any(e != e for e in errors) else f"{max(errors):.2f}"


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--dtype", default="float16", choices=list(harness.POLICIES))
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of tracing")
    parser.add_argument("--compilations", type=int, default=2, help="timed rounds of compilation")
    parser.add_argument("--no-compile", action="store_true", help="do not time compilation")
    parser.add_argument("--regions", action="store_true", help="compare rematerialisation regions, not libraries")
    parser.add_argument("--residuals", nargs="+", choices=get_args(Residuals), help="compare these, not libraries")
    parser.add_argument("--programs", nargs="*", default=list(REGISTRY), help="programs of the zoo (default: all)")
    parser.add_argument("--missing", action="store_true", help="run only programs without results")
    args = parser.parse_args()
    if args.no_compile:
        commands.refuse(parser, args, "--compilations", "with --no-compile")
    # jax.numpy and the peers warn about truncation and deprecation; a warning is not a failure.
    warnings.simplefilter("ignore")
    if args.residuals:
        commands.refuse(parser, args, "--regions", "with --residuals")
    title = f"casting_{args.dtype}" + "_regions" * args.regions + "_residuals" * bool(args.residuals)
    compilations = 0 if args.no_compile else args.compilations
    results = {name: rows for name, rows in previous(title, args.out).items() if name in REGISTRY}
    for name in args.programs:
        if args.missing and name in results:
            continue
        tools = casters(REGISTRY[name], args.regions, args.residuals or ())
        results[name] = run(name, args.dtype, args.rounds, compilations, tools)
        print(name, list(results[name].values())[1], file=sys.stderr)
        commands.publish(title, results, summary(results), args.out)
    print(summary(results))


if __name__ == "__main__":
    main()
