"""The report of `parity`: a verdict for each policy, the curves, and why a policy is worse."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.inspection.parity.evidence import Evidence, explained
from mpjax.inspection.parity.statistics import PairedComparison, differences, rounded
from mpjax.inspection.parity.training import Run
from mpjax.inspection.reports import Report, Section, plain

_COLUMNS = "policy|>mean ± sd|>difference|>95 % interval|>skipped|verdict"


@dataclasses.dataclass(frozen=True)
class ParityReport(Report):
    """A comparison of policies with a baseline over seeds; `print` it.

    Args:
        make: The name of the `MakeTraining`.
        baseline: The reference policy.
        seeds: The seeds of the runs.
        metric_name: The name of the metric.
        larger_is_better: Whether larger values of the metric are better.
        percent: Whether the metric is shown in percent, and its differences in points.
        comparisons: The comparison of each policy with the baseline, in the order of the call.
        evidence: The evidence on each policy that is worse.
        runs: All runs.
    """

    make: str
    baseline: str
    seeds: tuple[int, ...]
    metric_name: str
    larger_is_better: bool
    percent: bool
    comparisons: tuple[PairedComparison, ...]
    runs: tuple[Run, ...]
    evidence: tuple[Evidence, ...] = ()

    def __getitem__(self, policy: str) -> PairedComparison:
        """The comparison of a policy.

        Raises:
            KeyError: There is no such comparison.
        """
        found = {each.policy: each for each in self.comparisons}
        if policy not in found:
            raise KeyError(f"{policy!r} was not compared; these were: {', '.join(map(repr, found))}")
        return found[policy]

    def runs_of(self, policy: str) -> list[Run]:
        """The runs of a policy, by seed."""
        return sorted((run for run in self.runs if run.policy == policy), key=lambda run: run.seed)

    @property
    def title(self) -> str:
        """The page's title."""
        return f"Parity of {self.make}"

    def verdict(self, policy: str) -> str:
        """The verdict on a policy in words."""
        return self[policy].verdict(self.percent, f"of {self.metric_name}")

    def failure(self) -> str:
        """The failure message, which names the policies that are worse; empty if there are none."""
        worse = [each.policy for each in self.comparisons if each.kind == "worse"]
        return f"worse than {self.baseline}: {', '.join(worse)}" if worse else ""

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary; `comparisons` are the rows of `table`."""
        return super().to_dict() | {"comparisons": self.table()}

    def table(self) -> list[dict[str, Any]]:
        """One dictionary per policy."""
        return [self._row(each) for each in self.comparisons]

    def _row(self, found: PairedComparison) -> dict[str, Any]:
        row = {name: value for name, value in plain(found).items() if name != "interval"}
        skipped = sum(len(run.skipped) for run in self.runs_of(found.policy))
        return row | found.interval._asdict() | {"verdict": self.verdict(found.policy), "skipped_steps": skipped}

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        rows = [self._cells(policy) for policy in (self.baseline, *(each.policy for each in self.comparisons))]
        return [
            Section("", "\n".join(self._finding()), figure=self._draw),
            Section("By policy", "", _COLUMNS, rows),
            *(section for each in self.evidence for section in explained(each, self.baseline)),
        ]

    def _finding(self) -> list[str]:
        lines = [f"{each.policy}: {self.verdict(each.policy)}" for each in self.comparisons]
        saturated = {run.metric for run in self.runs}
        if len(saturated) == 1 and len(self.runs) > 1:
            lines.append(f"{self.metric_name} is {saturated.pop():g} in every run: it cannot distinguish the policies")
        if not any(each.diverged for each in self.comparisons):
            rate = 1 - 0.05 ** (1 / len(self.seeds))
            lines.append(f"no run diverged; {len(self.seeds)} seeds exclude only a share above {rate:.0%} that do")
        steps = max(len(run.losses) for run in self.runs)
        better = "larger" if self.larger_is_better else "smaller"
        count = len(self.seeds)
        lines.append(
            f"{self.metric_name}, {better} is better, against {self.baseline}; {count} "
            f"seed{'s' if count > 1 else ''} of {steps} steps"
        )
        return lines

    def _cells(self, policy: str) -> tuple[str, ...]:
        runs = self.runs_of(policy)
        skipped = f"{sum(len(run.skipped) for run in runs)}"
        if policy == self.baseline:
            return policy, self._mean(runs), "", "", skipped, "the baseline"
        found = self[policy]
        low, mean, high = (self._factor * x for x in found.interval)
        margin = self._factor * found.interval.margin
        interval = f"{rounded(low, margin)} to {rounded(high, margin)}" if math.isfinite(margin) else "-"
        difference = rounded(mean, margin) if math.isfinite(mean) else "-"
        return policy, self._mean(runs), difference, interval, skipped, self.verdict(policy)

    @property
    def _factor(self) -> float:
        return 100.0 if self.percent else 1.0

    def _mean(self, runs: Sequence[Run]) -> str:
        values = [self._factor * run.metric for run in runs if run.finite]
        unit = " %" if self.percent else ""
        if not values:
            return "not finite"
        if len(values) == 1:
            return f"{values[0]:.5g}{unit}"
        deviation = statistics.stdev(values)
        return f"{rounded(statistics.mean(values), deviation)} ± {rounded(deviation, deviation)}{unit}"

    def _draw(self, axes: Any) -> None:
        """Draws the paired differences of the losses, with intervals."""
        axes.axhline(0, color="black", linewidth=1)
        policies = dict.fromkeys(run.policy for run in self.runs if run.policy != self.baseline)
        for i, policy in enumerate(policies):
            found = differences(self.runs_of(policy), self.runs_of(self.baseline))
            low, mean, high = (np.where(np.isfinite(values), values, np.nan) for values in found[1:])
            axes.plot(found.steps, mean, color=f"C{i}", label=policy, marker="o" if len(found.steps) == 1 else "")
            axes.fill_between(found.steps, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
        axes.set(title=self.title, xlabel="step", ylabel=f"loss − {self.baseline}'s, mean with 95 % interval")
