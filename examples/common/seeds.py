"""The same training in several ways, with several seeds each, as one table with mean and standard deviation."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import tyro

from examples.common.cli import UsageError, command_line, fail
from examples.common.loop import Interrupted

Way = Mapping[str, str]  # flag without its dashes, to its value: {"policy": "mixed_float16", "amp": "module"}


class Column(NamedTuple):
    """A metric of the table: its head, and its key in summary.json; shown in percent."""

    head: str
    key: str


class Seeds(Protocol):
    """What is asked for: the fields of a script's own flags."""

    @property
    def seeds(self) -> tuple[int, ...]: ...

    @property
    def output(self) -> Path: ...

    def ways(self) -> list[Way]: ...


def main(
    program: str,
    asked: type[Seeds],
    run: Callable[[list[str]], dict[str, Any]],
    final_line: Callable[[dict[str, Any]], str],
    columns: Sequence[Column],
    arguments: Sequence[str] | None,
) -> int:
    """Runs a command line and returns its exit code; mistakes exit with code 2.

    Args:
        program: as people call it.
        asked: a dataclass of its own flags; all others go to `run`.
        run, final_line: as in `train_all`.
        columns: of the table, which goes to `results.md` in the output folder and is printed.
        arguments: of the command line; those of this process if None.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    seeds, flags = tyro.cli(asked, prog=program, args=arguments, return_unknown_args=True)
    try:
        summaries = train_all(seeds.ways(), seeds.seeds, seeds.output, lambda own: run([*flags, *own]), final_line)
    except UsageError as error:
        fail(program, error)
    except Interrupted as interrupted:
        print(f"{interrupted}; continue with:\n  {command_line(program, arguments)}")
        return interrupted.exit_code
    text = table(summaries, columns)
    (seeds.output / "results.md").write_text(text + "\n")
    print(text)
    return 0


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
    jax.config.update("jax_compilation_cache_dir", before or str((output / "compiled").absolute()))
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
