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
from examples.common.cli import UsageError, command_line, fail, markdown_table
from examples.common.flags import Group, parse, parse_known
from examples.common.loop import Interrupted
from examples.common.modes import final_line, run
from examples.common.task import Task

_TABLE = Group("table")
_FLAGS = ("policy", "amp", "loss-scale")


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Trains every policy with every seed and prints a table; all other flags go to the training script."""

    policies: tuple[str, ...] = _TABLE(("float32", "mixed_float16", "mixed_bfloat16"), "policies to compare")
    amps: tuple[Literal["module", "autocast"], ...] = _TABLE(("module", "autocast"), "autocast: not for all policies")
    loss_scales: tuple[str, ...] = _TABLE(("dynamic",), "loss scales of the policies that compute in float16")
    seeds: tuple[int, ...] = _TABLE((0, 1, 2, 3, 4), "seeds to train each policy with")
    output: Path | None = _TABLE(None, "folder (default: runs/SCRIPT-seeds); runs in it are continued or reused")

    def variants(self) -> list[tuple[str, ...]]:
        """The values of `_FLAGS` in each row of the table."""
        variants = []
        for name, amp, scale in itertools.product(self.policies, self.amps, self.loss_scales):
            policy = mpjax.get_policy(name)
            if amp == "module" or (policy.param_dtype == "float32" and policy.compute_dtype != "float32"):
                variants.append((name, amp, scale if policy.compute_dtype == "float16" else "1"))
        return list(dict.fromkeys(variants))


def main(kind: type[Task], arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code. Mistakes exit with code 2.

    Args:
        kind: The script's task. Its `table` has the columns of the table, which is written to `results.md` too.
        arguments: The arguments; None for `sys.argv`.
    """
    program = f"python -m examples.{kind.config_type.script}.seeds"
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # All seeds of a variant share one program. With the cache, it is compiled only once.
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        seeds, flags = parse_known(Seeds, program, arguments)
        output = seeds.output or Path(f"runs/{kind.config_type.script}-seeds")
        jax.config.update("jax_compilation_cache_dir", before or str((output / "compiled").absolute()))
        rows: dict[tuple[str, ...], list[dict[str, Any]]] = {variant: [] for variant in seeds.variants()}
        # Variants alternate, so that a slow moment of the machine affects all of them.
        for seed, variant in itertools.product(seeds.seeds, rows):
            rows[variant].append(_train(kind, flags, variant, seed, output))
    except UsageError as error:
        fail(program, error)
    except Interrupted as interrupted:
        print(f"{interrupted}; continue with:\n  {command_line(program, arguments)}")
        return interrupted.exit_code
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    text = table(rows, kind.table)
    (output / "results.md").write_text(text + "\n")
    print(text)
    return 0


def _train(kind: type[Task], given: Sequence[str], variant: Sequence[str], seed: int, output: Path) -> dict[str, Any]:
    """Trains a run, or continues or reuses it, and returns its summary."""
    folder = output / "-".join([*variant, f"seed{seed}"]).replace("/", "_")
    flags = [word for flag, value in zip(_FLAGS, variant, strict=True) for word in (f"--{flag}", value)]
    resume = ["--resume"] if (folder / "config.json").exists() else []
    words = [*given, *flags, "--seed", str(seed), "--output", str(folder), *resume]
    summary = run(parse(kind.config_type, f"python -m examples.{kind.config_type.script}", words), kind)
    print(f"{folder.name}: {final_line(summary, kind)}\n", flush=True)
    return summary


def table(rows: Mapping[tuple[str, ...], Sequence[Mapping[str, Any]]], columns: Mapping[str, str]) -> str:
    """The Markdown table of the summaries by variant."""
    heads = ["policy", *(f"`--{flag}`" for flag in _FLAGS[1:])]
    for head in columns.values():
        heads += [f"{head}, mean ± sd", "min", "max"]
    body = []
    for variant, runs in rows.items():
        cells = list(variant)
        for key in columns:
            values = [run[key] for run in runs]
            deviation = f"{statistics.stdev(values):.2%}" if len(values) > 1 else "-"
            cells += [f"{statistics.mean(values):.2%} ± {deviation}", f"{min(values):.2%}", f"{max(values):.2%}"]
        body.append([*cells, str(sum(run["skipped_steps"] for run in runs))])
    return markdown_table([*heads, "skipped steps"], body)
