"""Random programs under autocast, or random training programs: the properties that fail, with the smallest program.

    python -m testing.fuzz --examples 20000
    python -m testing.fuzz --training --examples 20000

An example's number alone determines it. Examples run in batches, and a report for each dtype is written after each
batch, so an interrupted run continues where it stopped. A failure of a new kind is shrunk at once. Further failures of
the same kind are only counted.

The dtypes share the trace without autocast, which does not depend on the dtype. The traces that show that the same
program gives the same jaxpr are made for the first or the last of them, alternately.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import gc
import json
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")

import jax

from testing import random_training as training
from testing.random_programs import Case, Failure, Rejected, Subject, check, numbered_case
from testing.random_programs.properties import cause_of
from testing.random_programs.reduction import shrink

REPORTS = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "mpjax-fuzz"
REJECTED = "rejected by JAX"
Outcome = tuple[str, Failure | None]
DTYPES = ("float16", "bfloat16", "float8", "mxfp8")

# Examples between two clearings of JAX's caches: programs share most of the entries.
CLEAR_CACHES_EVERY = 2000


def outcome_of(run: Callable[[], str]) -> Outcome:
    """The outcome of a check, and the failure if it failed."""
    try:
        return run(), None
    except Rejected:
        return REJECTED, None
    except Failure as failure:
        return "failed", failure
    except Exception as error:  # an error of the check itself: reported, to be fixed there
        return "failed", Failure("the check", cause_of(error), traceback.format_exc())


def examine_all(cases: Sequence[Case], compiled: bool) -> list[Outcome]:
    """The outcomes of one program's cases in several dtypes; the first is traced twice under autocast."""
    try:
        subject = Subject(cases[0])
    except Rejected:
        return [(REJECTED, None)] * len(cases)
    checks = [functools.partial(check, c, compiled=compiled, subject=subject, retrace=c is cases[0]) for c in cases]
    return [outcome_of(each) for each in checks]


def shrunk(case: Any, failure: Failure) -> tuple[Any, str]:
    """The smallest program found with this failure, and its message."""
    found = [str(failure)]
    of_training = isinstance(case, training.Case)
    examine: Callable[..., str] = training.check if of_training else check
    compiled = failure.property in ("runs compiled", "compiled")

    def fails(smaller: Any) -> bool:
        other = outcome_of(lambda: examine(smaller, compiled=compiled))[1]
        same = other is not None and other.signature == failure.signature
        if same:
            found[:] = [str(other)]
        return same

    smallest = shrink(case, fails, training.Case.simpler, float("inf")) if of_training else shrink(case, fails)
    return smallest, found[0]


class Report:
    """The state of a run, in a JSON file.

    Args:
        path: The file. If it exists, the run continues from it.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.data: dict[str, Any] = {
            "batches": 0,
            "seconds": 0.0,
            "outcomes": {},
            "passed_in_a_row": {"all": 0},
            "failures": {},
        }
        if path.exists():
            self.data = json.loads(path.read_text())

    def count(self, outcomes: collections.Counter[str], in_a_row: dict[str, int], seconds: float) -> None:
        """Adds a batch."""
        self.data["batches"] += 1
        self.data["seconds"] = round(self.data["seconds"] + seconds, 1)
        self.data["outcomes"] = dict(collections.Counter(self.data["outcomes"]) + outcomes)
        self.data["passed_in_a_row"] = in_a_row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1))

    def add(self, batch: Batch, number: int, shrink: Callable[[Any, Failure], tuple[Any, str]] | None) -> None:
        """Adds the new failures of a batch."""
        for key, (count, case, failure) in batch.new.items():
            smallest, detail = shrink(case, failure) if shrink else (case, str(failure))
            entry = {"count": count, "batch": number, "program": repr(smallest), "detail": detail[-4000:]}
            self.data["failures"][key] = entry

    def headline(self, batch: Batch) -> str:
        """The results of a batch on one line."""
        kinds = len(self.data["failures"])
        return f"{dict(batch.outcomes)}, {kinds} kinds of failure, {batch.in_a_row['all']} passed in a row"

    @property
    def examples(self) -> int:
        """The number of examples run."""
        return sum(self.data["outcomes"].values())

    def __str__(self) -> str:
        lines = [f"{self.examples} examples in {self.data['seconds']:.0f} s: {self.data['outcomes']}"]
        lines.append(f"passed in a row: {self.data['passed_in_a_row']}")
        for signature, found in sorted(self.data["failures"].items(), key=lambda item: -item[1]["count"]):
            lines += [f"\n## {found['count']} × {signature}", found["program"], found["detail"][-600:]]
        return "\n".join(lines)


@dataclasses.dataclass
class Batch:
    """The results of a batch.

    Args:
        known: The report's failures by signature; their counts are updated.
        in_a_row: Number of examples that passed since the last failure, of all and of those of the same group.
        outcomes: Number of examples by outcome.
        new: Failures that were not known: their count and the shortest program.
    """

    known: dict[str, Any]
    in_a_row: dict[str, int]
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    new: dict[str, tuple[int, Any, Failure]] = dataclasses.field(default_factory=dict)

    def add(self, case: Case | training.Case, outcome: str, failure: Failure | None) -> None:
        """Counts the outcome of an example."""
        self.outcomes[outcome] += 1
        for name in ("all", case.group):
            self.in_a_row[name] = 0 if failure else self.in_a_row.get(name, 0) + (outcome != REJECTED)
        if failure is None:
            return
        key = failure.signature
        if key in self.known:
            self.known[key]["count"] += 1
            return
        count, shortest, _ = self.new.get(key, (0, case, failure))
        if len(case.source) <= len(shortest.source):
            self.new[key] = (count + 1, case, failure)
        else:
            self.new[key] = (count + 1, *self.new[key][1:])


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Args:
        examples: Number of examples for each dtype.
        first: Number of the first example, so that several processes can share a run.
        batch: Number of examples between two reports.
        seconds: The run stops after the batch that exceeds this.
        shrink: Whether failures are shrunk.
        compile_every: Compiles and runs one in this many examples; none if 0.
    """

    examples: int = 1000
    first: int = 0
    batch: int = 100
    seconds: float = float("inf")
    shrink: bool = True
    compile_every: int = 50


def numbered(number: int, names: Sequence[str], compiled: bool) -> dict[str, tuple[Any, Outcome]]:
    """The numbered program of each report and its outcome."""
    if "training" in names:
        case = training.numbered_case(number)
        return {"training": (case, outcome_of(lambda: training.check(case, compiled)))}
    cases = [numbered_case(number, dtype) for dtype in sorted(names, reverse=bool(number % 2))]
    return {c.dtype: (c, found) for c, found in zip(cases, examine_all(cases, compiled), strict=True)}


def run(reports: Mapping[str, Report], options: Options) -> None:
    """Runs batches for the reports (dtypes, or "training") until the number of examples or the time is reached."""
    end, size = time.perf_counter() + options.seconds, options.batch
    while min(r.examples for r in reports.values()) < options.examples and time.perf_counter() < end:
        start, done = time.perf_counter(), min(r.data["batches"] for r in reports.values())
        batches = {name: Batch(r.data["failures"], r.data["passed_in_a_row"]) for name, r in reports.items()}
        numbers = range(options.first + done * size, options.first + (done + 1) * size)
        for number in numbers:
            compiled = bool(options.compile_every) and number % options.compile_every == 0
            for name, (case, found) in numbered(number, list(reports), compiled).items():
                batches[name].add(case, *found)
        for name, report in reports.items():
            report.add(batches[name], done, shrunk if options.shrink else None)
            report.count(batches[name].outcomes, batches[name].in_a_row, time.perf_counter() - start)
            print(f"{name}, {report.examples}: {report.headline(batches[name])}", flush=True)
        if numbers.stop % CLEAR_CACHES_EVERY < size:
            jax.clear_caches()


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--training", action="store_true", help="training programs, with mpjax and without a loss scale"
    )
    parser.add_argument("--examples", type=int, default=1000, help="examples for each dtype")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="dtype of matmuls (default: all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first example, to share a run")
    parser.add_argument("--batch", type=int, default=100, help="examples between two reports")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the batch that exceeds this")
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink failures")
    parser.add_argument("--reports", type=pathlib.Path, default=REPORTS, help="folder of the JSON reports")
    parser.add_argument("--compile-every", type=int, default=50, help="compile and run one in this many examples")
    args = parser.parse_args()
    if args.training and args.dtype:
        parser.error(f"--dtype {args.dtype[0]} has no effect with --training; leave it out")
    gc.set_threshold(50_000, 20, 20)  # tracing spends an eighth of its time on collections at the defaults
    names = ("training",) if args.training else args.dtype or DTYPES
    reports = {name: Report(args.reports / f"fuzz_{name}.json") for name in names}
    options = Options(args.examples, args.first, args.batch, args.seconds, not args.no_shrink, args.compile_every)
    run(reports, options)
    for dtype, report in reports.items():
        print(f"# {dtype}\n{report}\n")


if __name__ == "__main__":
    main()
