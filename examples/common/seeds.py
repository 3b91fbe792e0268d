"""Trains several configurations with several seeds each and tabulates the means and standard deviations."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from examples.common.cli import UsageError, command_line, fail, markdown_table
from examples.common.flags import Group, parse, parse_known
from examples.common.loop import Interrupted
from examples.common.modes import final_line, run
from examples.common.task import Task

_TABLE = Group("table")


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Trains every policy with every seed and prints a table; all other flags go to the training script."""

    policies: tuple[str, ...] = _TABLE(
        ("float32", "mixed_float16", "mixed_bfloat16"), 'policies, with further flags as "O1 --loss-scale 1"'
    )
    seeds: tuple[int, ...] = _TABLE((0, 1, 2), "seeds to train each policy with")
    output: Path | None = _TABLE(None, "folder (default: runs/SCRIPT-seeds); runs in it are continued or reused")


def main(kind: type[Task], arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code. Mistakes exit with code 2.

    Args:
        kind: The script's task. Its `table` has the columns of the table, which is written to `results.md` too.
        arguments: The arguments; None for `sys.argv`.
    """
    program = f"python -m examples.{kind.config_type.script}.seeds"
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # All seeds of a policy share one program. With the cache, it is compiled only once.
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        seeds, flags = parse_known(Seeds, program, arguments)
        output = seeds.output or Path(f"runs/{kind.config_type.script}-seeds")
        jax.config.update("jax_compilation_cache_dir", before or str((output / "compiled").absolute()))
        for policy in seeds.policies:  # before the first training
            _parse(kind, flags, policy)
        rows: dict[str, list[dict[str, Any]]] = {policy: [] for policy in seeds.policies}
        # Policies alternate, so that a slow moment of the machine affects all of them.
        for seed, policy in itertools.product(seeds.seeds, rows):
            rows[policy].append(_train(kind, flags, policy, seed, output))
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


def _parse(kind: type[Task], given: Sequence[str], policy: str, *more: str) -> Any:
    words = [*given, "--policy", *shlex.split(policy), *more]
    return parse(kind.config_type, f"python -m examples.{kind.config_type.script}", words)


def _train(kind: type[Task], given: Sequence[str], policy: str, seed: int, output: Path) -> dict[str, Any]:
    """Trains a run, or continues or reuses it, and returns its summary."""
    folder = output / re.sub(r"[^\w=,.]+", "-", f"{policy}-seed{seed}")
    resume = ["--resume"] if (folder / "config.json").exists() else []
    summary = run(_parse(kind, given, policy, "--seed", str(seed), "--output", str(folder), *resume), kind)
    print(f"{folder.name}: {final_line(summary, kind)}\n", flush=True)
    return summary


def table(rows: Mapping[str, Sequence[Mapping[str, Any]]], columns: Mapping[str, str]) -> str:
    """The Markdown table of the summaries by policy."""
    heads = ["policy"]
    for head in columns.values():
        heads += [f"{head}, mean ± sd", "min", "max"]
    body = []
    for policy, runs in rows.items():
        cells = [policy]
        for key in columns:
            values = [run[key] for run in runs]
            deviation = f"{statistics.stdev(values):.2%}" if len(values) > 1 else "-"
            cells += [f"{statistics.mean(values):.2%} ± {deviation}", f"{min(values):.2%}", f"{max(values):.2%}"]
        body.append([*cells, str(sum(run["skipped_steps"] for run in runs))])
    return markdown_table([*heads, "skipped steps"], body)
