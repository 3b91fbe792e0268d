"""The compiled program of autocast against half precision written by hand: `python -m benchmarks.compiled`.

For each program of the zoo that has a form written by hand with Flax's `dtype=`, this compiles the gradient and counts
the operations that XLA is given, on which its compile time depends, and matmuls, convolutions, converts and bytes in
the optimised HLO. On a CPU XLA adds its own converts around half arithmetic in every form, so only the ratios to the
hand-written form are meaningful.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any

# Before JAX starts (with the imports below): some programs of the zoo run on several devices.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax

import mpjax
from benchmarks import RESULTS
from perf.results import save
from testing.zoo import REGISTRY, harness

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=list(harness.POLICIES))
    comparable = [name for name, program in REGISTRY.items() if program.has_half and program.differentiable]
    parser.add_argument("--programs", nargs="*", default=comparable, help="default: all with a hand-written form")
    parser.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    args = parser.parse_args()

    results: dict[str, dict[str, Row]] = {}
    for name in args.programs:
        try:
            results[name] = {form: counts(name, caster, args.dtype) for form, caster in casters(name).items()}
        except Exception as error:  # XLA cannot compile one of the forms here, so there is no comparison
            print(f"{name}: skipped, {str(error).splitlines()[0][:120]}")
    path = save(f"compiled_{args.dtype}", results, args.out)
    table = summary(results)
    path.with_suffix(".md").write_text(table)
    print(table)


def summary(results: dict[str, dict[str, Row]]) -> str:
    """A Markdown table: for each form, the median over programs of its ratio to the hand-written form."""
    kinds = ["operations", "matmuls", "converts", "bytes", "flops", "temporary_bytes", "residual_bytes"]
    header = " | ".join(kind.replace("_", " ") for kind in kinds)
    lines = [
        f"| median of ratios to hand-written, {len(results)} programs | {header} |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for form in dict.fromkeys(form for rows in results.values() for form in rows):
        ratios = [
            [rows[form][kind] / rows["hand-written"][kind] for rows in results.values() if rows["hand-written"][kind]]
            for kind in kinds
        ]
        lines.append(f"| {form} | " + " | ".join(f"{statistics.median(r):.2f}" for r in ratios) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
