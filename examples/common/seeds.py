"""Trains several configurations with several seeds each and tabulates the means and standard deviations."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

import mpjax
from examples.common.cli import UsageError, command_line, fail
from examples.common.flags import Group, parse, parse_known
from examples.common.loop import Interrupted
from examples.common.modes import run
from examples.common.script import final_line
from examples.common.task import Task

Variant = Mapping[str, str]  # flags without dashes, to their values: {"policy": "mixed_float16", "amp": "module"}

_TABLE = Group("table")


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Trains every policy with every seed and prints a table; all other flags go to the training script."""

    policies: tuple[str, ...] = _TABLE(("float32", "mixed_float16", "mixed_bfloat16"), "policies to compare")
    amps: tuple[Literal["module", "autocast"], ...] = _TABLE(
        ("module", "autocast"),
        "how to apply them; autocast is left out for float32 and for policies with half parameters",
    )
    loss_scales: tuple[str, ...] = _TABLE(("dynamic",), "loss scales of the policies that compute in float16")
    seeds: tuple[int, ...] = _TABLE((0, 1, 2, 3, 4), "seeds to train each policy with")
    output: Path | None = _TABLE(
        None,
        "folder of the runs and the table (default: runs/SCRIPT-seeds); existing runs are continued or reused",
    )

    def variants(self) -> list[Variant]:
        """The flags of each row of the table."""
        variants: list[Variant] = []
        for name, amp, scale in itertools.product(self.policies, self.amps, self.loss_scales):
            policy = mpjax.get_policy(name)
            if amp == "autocast" and (policy.param_dtype != "float32" or policy.compute_dtype == "float32"):
                continue
            variant = {"policy": name, "amp": amp, "loss-scale": scale if policy.compute_dtype == "float16" else "1"}
            if variant not in variants:
                variants.append(variant)
        return variants


def main(kind: type[Task], arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code. Mistakes exit with code 2.

    Args:
        kind: The script's task. Its `table` has the columns of the table, which is written to `results.md` too.
        arguments: The arguments; None for `sys.argv`.
    """
    config = kind.config_type
    program = f"python -m examples.{config.script}.seeds"
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        seeds, flags = parse_known(Seeds, program, arguments)
        output = seeds.output or Path(f"runs/{config.script}-seeds")

        summaries = train_all(kind, flags, seeds.variants(), seeds.seeds, output)
    except UsageError as error:
        fail(program, error)
    except Interrupted as interrupted:
        print(f"{interrupted}; continue with:\n  {command_line(program, arguments)}")
        return interrupted.exit_code
    text = table(summaries, kind.table)
    (output / "results.md").write_text(text + "\n")
    print(text)
    return 0


def train_all(
    kind: type[Task], given: Sequence[str], variants: Sequence[Variant], seeds: Sequence[int], output: Path
) -> list[tuple[Variant, dict[str, Any]]]:
    """Trains the missing runs. Variants alternate, so that a slow moment of the machine affects all of them.

    Args:
        kind: The script's task.
        given: Flags of all runs.
        variants: The flags of each variant.
        seeds: Seeds to train each variant with.
        output: Folder with a subfolder for each run. Existing runs are continued or reused.
    """
    summaries = []
    # All seeds of a variant share one program. With the cache, it is compiled only once.
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", before or str((output / "compiled").absolute()))
    try:
        for seed in seeds:
            for variant in variants:
                name = "-".join([*variant.values(), f"seed{seed}"]).replace("/", "_")
                folder = output / name
                flags = [word for flag, value in variant.items() for word in (f"--{flag}", value)]
                resume = ["--resume"] if (folder / "config.json").exists() else []
                words = [*given, *flags, "--seed", str(seed), "--output", str(folder), *resume]
                summary = run(parse(kind.config_type, f"python -m examples.{kind.config_type.script}", words), kind)
                print(f"{name}: {final_line(summary, kind)}\n", flush=True)
                summaries.append((variant, summary))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    return summaries


def table(summaries: Sequence[tuple[Variant, Mapping[str, Any]]], columns: Mapping[str, str]) -> str:
    """The Markdown table of runs, with a row for each variant in order of first appearance."""
    variants = list(dict.fromkeys(tuple(variant.items()) for variant, _ in summaries))
    flags = list(dict.fromkeys(flag for variant in variants for flag, _ in variant))
    heads = ["policy" if flag == "policy" else f"`--{flag}`" for flag in flags]
    for head in columns.values():
        heads += [f"{head}, mean ± sd", "min", "max"]
    lines = ["| " + " | ".join([*heads, "skipped steps"]) + " |", "|" + "---|" * (len(heads) + 1)]
    for variant in variants:
        runs = [summary for other, summary in summaries if tuple(other.items()) == variant]
        cells = [dict(variant).get(flag, "-") for flag in flags]
        for key in columns:
            values = [run[key] for run in runs]
            deviation = f"{statistics.stdev(values):.2%}" if len(values) > 1 else "-"
            cells += [f"{statistics.mean(values):.2%} ± {deviation}", f"{min(values):.2%}", f"{max(values):.2%}"]
        cells.append(str(sum(run["skipped_steps"] for run in runs)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
