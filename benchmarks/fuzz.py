"""Random programs under autocast: which properties fail, on which smallest program.

    python -m benchmarks.fuzz --examples 20000 --dtype float16

Each example has a number, from which alone it follows. They run in batches, and a report is written after each batch,
so that an interrupted run goes on where it stopped. A failure of a new kind is shrunk at once; others of its kind are
only counted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import pathlib
import time
import traceback
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")

import jax

from testing.random_programs import Case, Failure, Rejected, check, numbered_case
from testing.random_programs.properties import cause_of
from testing.random_programs.reduction import reduced

REJECTED = "rejected by JAX"

# How many examples run between two times that JAX forgets what it traced and compiled: programs share most of it.
FORGET_EVERY = 2000


def examine(case: Case, compiled: bool = False) -> tuple[str, Failure | None]:
    """What came of a case: an outcome, and the failure if it failed."""
    try:
        return check(case, compiled=compiled), None
    except Rejected:
        return REJECTED, None
    except Failure as failure:
        return "failed", failure
    except Exception as error:  # of the check itself: reported, and mended there
        return "failed", Failure("the check", cause_of(error), traceback.format_exc())


def shrunk(case: Case, failure: Failure) -> tuple[Case, str]:
    """The smallest program found with this failure, and what it says."""
    found = [str(failure)]

    def fails(smaller: Case) -> bool:
        other = examine(smaller, failure.property == "runs compiled")[1]
        same = other is not None and other.signature == failure.signature
        if same:
            found[:] = [str(other)]
        return same

    return reduced(case, fails), found[0]


class Report:
    """The state of a run, in a JSON file.

    Args:
        path: the file; if it is there, the run goes on from it.
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

    @property
    def examples(self) -> int:
        """How many examples were run."""
        return sum(self.data["outcomes"].values())

    def __str__(self) -> str:
        lines = [f"{self.examples} examples in {self.data['seconds']:.0f} s: {self.data['outcomes']}"]
        lines.append(f"passed in a row: {self.data['passed_in_a_row']}")
        for signature, found in sorted(self.data["failures"].items(), key=lambda item: -item[1]["count"]):
            lines += [f"\n## {found['count']} × {signature}", found["program"], found["detail"][-600:]]
        return "\n".join(lines)


@dataclasses.dataclass
class Batch:
    """What came of the examples of a batch.

    Args:
        known: the report's failures, by signature; their counts grow.
        in_a_row: how many examples passed since the last failure, of all and of those with the same rules.
        compile_every: compiles and runs one example of so many; none if 0.
        outcomes: how many examples came to what.
        new: failures that were not known: how often, and the shortest program.
    """

    known: dict[str, Any]
    in_a_row: dict[str, int]
    compile_every: int
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    new: dict[str, tuple[int, Case, Failure]] = dataclasses.field(default_factory=dict)

    def add(self, case: Case) -> None:
        """Checks an example."""
        every = self.compile_every
        outcome, failure = examine(case, compiled=bool(every) and self.outcomes.total() % every == 0)
        self.outcomes[outcome] += 1
        for name in ("all", case.rules):
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


def run(
    report: Report,
    dtype: str,
    examples: int,
    size: int,
    shrink: bool,
    seconds: float,
    compile_every: int,
    first: int = 0,
) -> None:
    """Runs batches until so many examples were run, or so many seconds have passed."""
    begin = time.perf_counter()
    while report.examples < examples and time.perf_counter() - begin < seconds:
        number, start = first // size + report.data["batches"], time.perf_counter()
        batch = Batch(report.data["failures"], report.data["passed_in_a_row"], compile_every)
        for example in range(number * size, (number + 1) * size):
            batch.add(numbered_case(example, dtype))
        for key, (count, case, failure) in batch.new.items():
            smallest, detail = shrunk(case, failure) if shrink else (case, str(failure))
            entry = {"count": count, "batch": number, "program": repr(smallest), "detail": detail[-4000:]}
            report.data["failures"][key] = entry
        report.count(batch.outcomes, batch.in_a_row, time.perf_counter() - start)
        if (number + 1) * size % FORGET_EVERY < size:
            jax.clear_caches()
        figures = f"{len(report.data['failures'])} kinds of failure, {batch.in_a_row['all']} passed in a row"
        print(f"{report.examples}: {dict(batch.outcomes)}, {figures}", flush=True)


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--first", type=int, default=0, help="the number of the first example, so that runs can share")
    parser.add_argument("--batch", type=int, default=100, help="examples between two reports")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stops after the batch that exceeds this")
    parser.add_argument("--no-shrink", action="store_true", help="reports failures as they were found")
    parser.add_argument("--report", type=pathlib.Path, help="the JSON file of the run's state")
    parser.add_argument("--compile-every", type=int, default=50, help="compiles and runs one example of so many")
    options = parser.parse_args()
    path = options.report or pathlib.Path(f"benchmarks/results/fuzz_{options.dtype}.json")
    report = Report(path)
    run(
        report,
        options.dtype,
        options.examples,
        options.batch,
        not options.no_shrink,
        options.seconds,
        options.compile_every,
        options.first,
    )
    print(report)


if __name__ == "__main__":
    main()
