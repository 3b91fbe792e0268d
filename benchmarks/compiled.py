"""The compiled program of autocast against half precision written by hand: `python -m benchmarks.compiled`.

For each program of the zoo that has a form written by hand with Flax's `dtype=`, this compiles the gradient and counts
the operations that XLA is given, on which its compile time depends, and matmuls, convolutions, converts and bytes in
the optimised HLO. On a CPU XLA adds its own converts around half arithmetic in every form, so only the ratios to the
hand-written form are meaningful.

`--passes` instead prints the times that XLA's log names, summed over the programs: of each pass, and of the code of the
kernels. Of `--compilations` compilations of a program it takes the least, so that other processes matter little.
"""

from __future__ import annotations

import collections
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# Before JAX starts (with the imports below): some programs of the zoo run on several devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
if __name__ == "__main__" and "--passes" in sys.argv:  # An import leaves the log of other processes alone.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "hlo_pass_pipeline=1,fusion_compiler=1,ir_compiler=1"}

import jax

import mpjax
from benchmarks import commands
from testing.models.zoo import REGISTRY, harness

Row = dict[str, float]
_OPS = {"matmuls": re.compile(r" (?:dot|convolution)\("), "converts": re.compile(r" convert\(")}


def by_hand(name: str) -> harness.Caster:
    return lambda fun, policy: REGISTRY[name].handwritten(harness.half_of(policy))


def with_full_residuals(fun: Callable[..., Any], policy: str) -> Callable[..., Any]:
    return mpjax.autocast(fun, policy, rules=mpjax.Rules(residuals="full"))


def casters(name: str) -> dict[str, harness.Caster]:
    """The forms of a program; the first is the baseline."""
    return {
        "hand-written": by_hand(name),
        "float32": harness.identity,
        "mpjax.autocast": mpjax.autocast,
        "mpjax.autocast, residuals full": with_full_residuals,
    }


def counts(name: str, caster: harness.Caster, dtype: str) -> Row:
    """XLA's counts for the compiled gradient, and the residual bytes."""
    fun, args = harness.gradient_function(name, caster, dtype)
    with REGISTRY[name].context():
        lowered = jax.jit(fun, compiler_options=harness.COMPILE_FAST).lower(*args)
        compiled: Any = lowered.compile()
    text, cost = compiled.as_text(), compiled.cost_analysis()
    row: Row = {"operations": lowered.as_text().count(" = ")}
    row |= {kind: len(pattern.findall(text)) for kind, pattern in _OPS.items()}
    row["bytes"] = cost.get("bytes accessed", float("nan"))
    row["flops"] = cost.get("flops", float("nan"))
    row["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    row["residual_bytes"] = harness.residuals(name, caster, dtype)
    return row


_BEGUN = r"\] +HLO pass (\S+)$"
_ENDED = r"\] (HLO pass|Compiled MLIR module|Compiled LLVM module): (\S+) time: .*?\((\d+) us\)"
_TIMED = re.compile(f"{_BEGUN}|{_ENDED}", re.MULTILINE)
_KERNELS = {"Compiled MLIR module": "kernels: MLIR", "Compiled LLVM module": "kernels: LLVM"}


def times_of_passes(name: str, caster: harness.Caster, dtype: str, compilations: int) -> Row:
    """The milliseconds that XLA takes for each pass over the gradient, and for the code of its kernels."""
    fun, args = harness.gradient_function(name, caster, dtype)
    rows = []
    with REGISTRY[name].context():
        for _ in range(compilations):
            lowered = jax.jit(lambda *args: fun(*args), compiler_options=harness.COMPILE_FAST).lower(*args)
            rows.append(_exclusive_times(_log_of(lowered.compile)))
    return {each: min(row[each] for row in rows) for each in rows[0]}


def _log_of(run: Callable[[], Any]) -> str:
    """What XLA writes to the standard error while a function runs."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            run()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        return file.read().decode(errors="replace")


def _exclusive_times(log: str) -> collections.Counter[str]:
    """The milliseconds of each pass without those of the passes inside it, and of the kernels together."""
    times: Any = collections.Counter()
    inside = [0]  # for each pass that has begun, the microseconds of the passes inside it
    for begun, kind, name, number in _TIMED.findall(log):
        if begun:
            inside.append(0)
        elif kind in _KERNELS:
            times[_KERNELS[kind]] += int(number) / 1e3
        else:
            times[name] += (int(number) - inside.pop()) / 1e3
            inside[-1] += int(number)
    return times


def passes_table(results: dict[str, dict[str, Row]], longest: int = 6) -> str:
    """A Markdown table: for each form, the milliseconds of the passes that take longest, over all programs."""
    forms = list(next(iter(results.values())))
    times: dict[str, collections.Counter[str]] = {form: collections.Counter() for form in forms}
    for rows in results.values():
        for form, row in rows.items():
            times[form].update(row)
    every = set().union(*times.values())
    passes = [name for name, _ in times["mpjax.autocast"].most_common() if name not in _KERNELS.values()]
    groups = {name: {name} for name in (*_KERNELS.values(), *passes[:longest])}
    groups["all other passes"] = every.difference(groups)
    groups["together"] = every
    lines = []
    for title, names in groups.items():
        sums = {form: sum(times[form][name] for name in names) for form in forms}
        lines.append([title, *(f"{sums[form]:.0f} ({sums[form] / sums['float32']:.2f})" for form in forms)])
    return commands.markdown([f"milliseconds, {len(results)} programs", *forms], lines)


def main() -> None:
    parser = commands.parser(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=list(harness.POLICIES))
    comparable = [name for name, program in REGISTRY.items() if program.has_half and program.differentiable]
    parser.add_argument("--programs", nargs="*", default=comparable, help="default: all with a hand-written form")
    parser.add_argument("--passes", action="store_true", help="print the time of XLA's passes instead")
    parser.add_argument("--compilations", type=int, default=3, help="compilations of each program for --passes")
    args = parser.parse_args()
    if args.passes:
        commands.refuse(parser, args, "--out", "with --passes, which only prints")
    else:
        commands.refuse(parser, args, "--compilations", "without --passes")

    results: dict[str, dict[str, Row]] = {}
    for name in args.programs:
        try:
            results[name] = {
                form: times_of_passes(name, caster, args.dtype, args.compilations)
                if args.passes
                else counts(name, caster, args.dtype)
                for form, caster in casters(name).items()
            }
        except Exception as error:  # XLA cannot compile one of the forms here, so there is no comparison
            print(f"{name}: skipped, {str(error).splitlines()[0][:120]}")
    if args.passes:
        print(passes_table(results))
        return
    commands.publish(f"compiled_{args.dtype}", results, summary(results), args.out)
    print(summary(results))


def summary(results: dict[str, dict[str, Row]]) -> str:
    """A Markdown table: for each form, the median over programs of its ratio to the hand-written form."""
    kinds = ["operations", "matmuls", "converts", "bytes", "flops", "temporary_bytes", "residual_bytes"]
    header = [f"median of ratios to hand-written, {len(results)} programs", *(k.replace("_", " ") for k in kinds)]
    lines = []
    for form in dict.fromkeys(form for rows in results.values() for form in rows):
        ratios = [
            [rows[form][kind] / rows["hand-written"][kind] for rows in results.values() if rows["hand-written"][kind]]
            for kind in kinds
        ]
        lines.append([form, *(f"{statistics.median(r):.2f}" for r in ratios)])
    return commands.markdown(header, lines)


if __name__ == "__main__":
    main()
