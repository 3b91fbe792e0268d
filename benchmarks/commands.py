"""What the commands of the benchmarks share: the arguments, the files of results, and tables."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks import RESULTS
from perf.results import save


def parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of a command, with the folder of its results."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    return made


def refuse(parser: argparse.ArgumentParser, args: argparse.Namespace, flags: str, when: str) -> None:
    """Ends with an error if one of these flags was given, which have no effect in this mode.

    Args:
        flags: Their names, separated by spaces.
        when: The mode in words.
    """
    for flag in flags.split():
        name = flag.strip("-").replace("-", "_")
        if (value := getattr(args, name)) != parser.get_default(name):
            parser.error(f"{flag} {value} has no effect {when}; leave it out")


def publish(name: str, results: Any, table: str, out: pathlib.Path) -> None:
    """Writes the results, with their environment, and the table beside them."""
    save(name, results, out).with_suffix(".md").write_text(table)


def number(value: float | None, form: str) -> str:
    """A formatted number; a dash if there is none."""
    return "-" if value is None else form.format(value)


def with_quartiles(row: dict[str, Any]) -> str:
    """A ratio of `perf.timing.ratios` with its quartiles."""
    low, high = row["ratio_quartiles"]
    return f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = (f"| {' | '.join(map(str, line))} |" for line in (header, *rows))
    return "\n".join((next(lines), f"|{'---|' * len(header)}", *lines)) + "\n"
