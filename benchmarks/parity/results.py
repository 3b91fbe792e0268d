"""The results of the families: one JSON file, one table, one figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import commands
from benchmarks.parity.families import FAMILIES
from benchmarks.parity.family import Family
from mpjax.inspection import ParityReport
from mpjax.inspection.comparison.statistics import rounded

Row = dict[str, Any]
SIGNS = {"equal": "=", "small": "≈", "better": "better", "worse": "**worse**", "unclear": "?"}


def row(family: Family, report: ParityReport) -> Row:
    """The stored results of a family."""
    baseline = [run.metric for run in report.runs_of(report.baseline)]
    return {
        "name": family.name,
        "data": family.data,
        "metric": family.metric,
        "larger_is_better": family.larger_is_better,
        "steps": family.steps,
        "float32": {"metrics": baseline, **_summary(baseline)},
        "policies": {
            found["policy"]: {
                **found,
                "metrics": [run.metric for run in report.runs_of(found["policy"])],
                "skipped": [len(run.skipped) for run in report.runs_of(found["policy"])],
                "last_losses": [last_loss(run.losses) for run in report.runs_of(found["policy"])],
            }
            for found in report.to_dict()["comparisons"]
        },
    }


def merged(before: Row | None, now: Row) -> Row:
    """A row with the policies of an earlier one, if both compare with the same float32 runs."""
    if before is None or any(before[name] != now[name] for name in now if name != "policies"):
        return now
    return {**now, "policies": before["policies"] | now["policies"]}


def _summary(values: list[float]) -> dict[str, float]:
    finite = [value for value in values if math.isfinite(value)]
    return {
        "mean": statistics.mean(finite) if finite else math.nan,
        "sd": statistics.stdev(finite) if len(finite) > 1 else math.nan,
    }


def last_loss(losses: Sequence[float]) -> float:
    """The mean loss of the last twentieth of the steps."""
    return statistics.fmean(losses[-max(len(losses) // 20, 1) :])


def table(results: dict[str, Row]) -> str:
    """Markdown: a row for each family, a column for each policy."""
    policies = list(dict.fromkeys(policy for found in results.values() for policy in found["policies"]))
    lines = [
        "Difference of the metric from float32 with its 95 % interval, paired by seed. `=`: the interval is within",
        "± the standard deviation of float32 over seeds; `?`: too few seeds, and about how many are needed;",
        "`better` and `worse`: the interval excludes zero. All precisions share seeds, batches and hyperparameters.",
    ]
    rows = []
    for found in results.values():
        arrow = "↑" if found["larger_is_better"] else "↓"
        base = found["float32"]
        cells = [_cell(found["policies"].get(policy)) for policy in policies]
        mean = f"{rounded(base['mean'], base['sd'])} ± {rounded(base['sd'], base['sd'])}"
        count = len(base["metrics"])
        rows.append([found["name"], f"{found['metric']} {arrow}", count, mean, *cells])
    families = commands.markdown(["family", "metric", "seeds", "float32", *policies], rows)
    return "\n".join([*lines, "", families, *_counts(results, policies)]) + "\n"


def _counts(results: dict[str, Row], policies: list[str]) -> list[str]:
    """The count of each verdict, and a description of the data."""
    lines = []
    for policy in policies:
        kinds = [found["policies"][policy]["kind"] for found in results.values() if policy in found["policies"]]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in SIGNS if kind in kinds)
        lines.append(f"- `{policy}`: {counts}, of {len(kinds)} families")
    if missing := [name for name in FAMILIES if name not in results]:
        lines += ["", f"Partial: {len(missing)} families have not been measured yet ({', '.join(missing)})."]
    lines += ["", "Data and length of the trainings:", ""]
    return lines + [f"- {found['name']}: {found['data']}; {found['steps']} steps" for found in results.values()]


def _cell(found: Row | None) -> str:
    if found is None:
        return "-"
    if found["diverged"]:
        return f"**{found['verdict']}**"
    margin = max(found["high"] - found["mean"], found["mean"] - found["low"])
    interval = f"{rounded(found['mean'], margin)} ({rounded(found['low'], margin)} to {rounded(found['high'], margin)})"
    needed = f" {found['seeds_needed']}" if found["kind"] == "unclear" and found["seeds_needed"] else ""
    skipped = f", {sum(found['skipped'])} skipped" if sum(found["skipped"]) else ""
    return f"{SIGNS[found['kind']]}{needed} {interval}{skipped}"
