"""The same training in several ways, with several seeds each, as one table with mean and standard deviation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

Way = Mapping[str, str]  # flag without its dashes, to its value: {"policy": "mixed_float16", "amp": "module"}


class Column(NamedTuple):
    """A metric of the table: its head, and its key in summary.json; shown in percent."""

    head: str
    key: str


def train_all(
    ways: Sequence[Way],
    seeds: Sequence[int],
    output: Path,
    run: Callable[[list[str]], dict[str, Any]],
    final_line: Callable[[dict[str, Any]], str],
) -> list[tuple[Way, dict[str, Any]]]:
    """Trains what is not there yet; ways alternate, so that a slow minute of the machine hits all alike.

    Args:
        ways: the flags of each.
        seeds: to train each way with.
        output: folder of a folder for each run; what is there already is continued or reused.
        run: trains as flags say and returns what is in summary.json.
        final_line: says what a run came to.
    """
    summaries = []
    # Seeds differ in numbers, not in the program: it is compiled once for each way.
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str((output / "compiled").absolute()))
    try:
        for seed in seeds:
            for way in ways:
                name = "-".join([*way.values(), f"seed{seed}"]).replace("/", "_")
                folder = output / name
                flags = [word for flag, value in way.items() for word in (f"--{flag}", value)]
                resume = ["--resume"] if (folder / "config.json").exists() else []
                summary = run([*flags, "--seed", str(seed), "--output", str(folder), *resume])
                print(f"{name}: {final_line(summary)}\n", flush=True)
                summaries.append((way, summary))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    return summaries


def table(summaries: Sequence[tuple[Way, Mapping[str, Any]]], columns: Sequence[Column]) -> str:
    """The Markdown table of runs: a row for each way, in the order in which they first appear."""
    ways = list(dict.fromkeys(tuple(way.items()) for way, _ in summaries))
    flags = list(dict.fromkeys(flag for way in ways for flag, _ in way))
    heads = ["policy" if flag == "policy" else f"`--{flag}`" for flag in flags]
    for column in columns:
        heads += [f"{column.head}, mean ± sd", "min", "max"]
    lines = ["| " + " | ".join([*heads, "skipped steps"]) + " |", "|" + "---|" * (len(heads) + 1)]
    for way in ways:
        runs = [summary for other, summary in summaries if tuple(other.items()) == way]
        cells = [dict(way).get(flag, "-") for flag in flags]
        for column in columns:
            values = [run[column.key] for run in runs]
            deviation = f"{statistics.stdev(values):.2%}" if len(values) > 1 else "-"
            cells += [f"{statistics.mean(values):.2%} ± {deviation}", f"{min(values):.2%}", f"{max(values):.2%}"]
        cells.append(str(sum(run["skipped_steps"] for run in runs)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
