"""`python -m examples.imagenet.seeds`: the same training with several policies and seeds, as one table."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from examples.common.cli import UsageError, command_line, fail
from examples.imagenet.__main__ import final_line
from examples.imagenet.config import Config
from examples.imagenet.loop import Interrupted, run

PROGRAM = "python -m examples.imagenet.seeds"


@dataclasses.dataclass(frozen=True)
class Seeds:
    """Trains every policy with every seed and prints a table; takes the flags of examples.imagenet too."""

    policies: tuple[str, ...] = ("float32", "mixed_float16", "mixed_bfloat16")
    """Policies to compare."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to train each of them with."""

    output: Path = Path("runs/imagenet-seeds")
    """Folder for a folder of each run and the table; runs that are there already are continued or reused."""


def table(summaries: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of runs: a row for each policy, in the order in which they first appear."""
    rows = [
        "| policy | test accuracy, mean | min | max | images/s | skipped steps |",
        "|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(summary["policy"] for summary in summaries):
        runs = [summary for summary in summaries if summary["policy"] == policy]
        accuracies = [summary["test_accuracy"] for summary in runs]
        speed = statistics.median(summary["images_per_second"] for summary in runs)
        skipped = sum(summary["skipped_steps"] for summary in runs)
        rows.append(
            f"| {policy} | {statistics.mean(accuracies):.2%} | {min(accuracies):.2%} | {max(accuracies):.2%} "
            f"| {speed:,.0f} | {skipped} |"
        )
    return "\n".join(rows)


def train_all(seeds: Seeds, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Trains what is not there yet. Policies alternate, so that a slow minute of the machine hits all alike."""
    summaries = []
    for seed in seeds.seeds:
        for policy in seeds.policies:
            output = seeds.output / f"{policy.replace('/', '_')}-seed{seed}"
            own = ["--policy", policy, "--seed", str(seed), "--output", str(output)]
            # A folder without a checkpoint has nothing to go on from, and nothing to lose.
            started = any((output / "checkpoints").glob("[0-9]*"))
            resume = ["--resume"] if started else []
            summary = run(tyro.cli(Config, prog=PROGRAM, args=[*flags, *own, *resume]))
            print(f"seed {seed}: {final_line(summary)}\n")
            summaries.append(summary)
    return summaries


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; mistakes exit with code 2."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    seeds, flags = tyro.cli(Seeds, prog=PROGRAM, args=arguments, return_unknown_args=True)
    try:
        text = table(train_all(seeds, flags))
    except UsageError as error:
        fail(PROGRAM, error)
    except Interrupted as interrupted:
        print(f"{interrupted}; continue with:\n  {command_line(PROGRAM, arguments)}")
        return interrupted.exit_code
    (seeds.output / "results.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
