"""The results of the families: one JSON file, one table, one figure."""

from __future__ import annotations

import math
import pathlib
import statistics
from typing import Any

from benchmarks.parity.families import FAMILIES
from benchmarks.parity.family import Family
from mpjax.inspection.parity.report import ParityReport
from mpjax.inspection.parity.statistics import rounded

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
                "last_losses": [_last_loss(run.losses) for run in report.runs_of(found["policy"])],
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


def _last_loss(losses: tuple[float, ...]) -> float:
    """The mean loss of the last twentieth of the steps."""
    return statistics.fmean(losses[-max(len(losses) // 20, 1) :])


def table(results: dict[str, Row]) -> str:
    """Markdown: a row for each family, a column for each policy."""
    policies = list(dict.fromkeys(policy for found in results.values() for policy in found["policies"]))
    lines = [
        "Difference of the metric from float32 with its 95 % interval, paired by seed. `=`: the interval is within",
        "± the standard deviation of float32 over seeds; `?`: too few seeds, and about how many are needed;",
        "`better` and `worse`: the interval excludes zero. All precisions share seeds, batches and hyperparameters.",
        "",
        f"| family | metric | seeds | float32 | {' | '.join(policies)} |",
        "|---" * (4 + len(policies)) + "|",
    ]
    for found in results.values():
        arrow = "↑" if found["larger_is_better"] else "↓"
        base = found["float32"]
        cells = [_cell(found["policies"].get(policy)) for policy in policies]
        mean = f"{rounded(base['mean'], base['sd'])} ± {rounded(base['sd'], base['sd'])}"
        count = len(base["metrics"])
        lines.append(f"| {found['name']} | {found['metric']} {arrow} | {count} | {mean} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_counts(results, policies)]) + "\n"


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


def plot(path: pathlib.Path, results: dict[str, Row]) -> None:
    """A panel for each family: the intervals in units of float32's deviation over seeds, and the band of ±1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    policies = list(dict.fromkeys(policy for found in results.values() for policy in found["policies"]))
    columns = min(6, len(results))
    rows = -(-len(results) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(2.2 * columns, 0.7 + (0.6 + 0.2 * len(policies)) * rows), squeeze=False, sharey=True
    )
    colours = {"equal": "tab:green", "better": "tab:blue", "worse": "tab:red", "unclear": "tab:gray"}
    for panel, found in zip(panels.flat, results.values(), strict=False):
        panel.axvspan(-1, 1, color="0.92")
        panel.axvline(0, color="0.6", linewidth=0.8)
        for height, policy in enumerate(policies):
            result = found["policies"].get(policy)
            if result is None or not math.isfinite(result["mean"]) or not result["noise"]:
                continue
            # Further right is better for every metric.
            sign = (1 if found["larger_is_better"] else -1) / result["noise"]
            ends = sorted((result["low"] * sign, result["high"] * sign))
            panel.plot([max(min(end, 4), -4) for end in ends], [height] * 2, color=colours[result["kind"]])
            panel.plot(max(min(result["mean"] * sign, 4), -4), height, "o", markersize=3, color=colours[result["kind"]])
        panel.set_title(found["name"], fontsize=8)
        panel.set_xlim(-4.2, 4.2)
        panel.tick_params(labelsize=6)
    for panel in list(panels.flat)[len(results) :]:
        panel.set_visible(False)
    panels[0][0].set_yticks(range(len(policies)), policies, fontsize=6)
    panels[0][0].set_ylim(len(policies) - 0.5, -0.5)
    figure.supxlabel("difference from float32 / its standard deviation over seeds (right: better)", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
