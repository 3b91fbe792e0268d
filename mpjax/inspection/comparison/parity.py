"""`parity`: compares policies over seeds, with an interval, a verdict in words, and evidence on what is worse."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpjax.inspection.comparison.statistics import PairedComparison, compare, differences, parted_at, rounded
from mpjax.inspection.comparison.training import MakeTraining as MakeTraining
from mpjax.inspection.comparison.training import Run, make_training, run_training
from mpjax.inspection.comparison.training import Training as Training
from mpjax.inspection.layer_errors import LayerwiseReport, layerwise_error
from mpjax.inspection.ranges.numerics import NumericsReport, numerics
from mpjax.inspection.reports import Report, Section, percent, plain, scale_text

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

    heading = "Parity of {0.make}"

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
        steps, count = max(len(run.losses) for run in self.runs), len(self.seeds)
        better = "larger" if self.larger_is_better else "smaller"
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
        values = [self._factor * run.metric for run in runs if math.isfinite(run.metric)]
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


def parity(
    make: Callable[..., Any],
    policies: Sequence[str] = ("mixed_float16", "mixed_bfloat16"),
    seeds: int | Iterable[int] = 5,
    *,
    baseline: str = "float32",
) -> ParityReport:
    """Tests whether half precision changes the result of a training run, by comparing policies with float32 over seeds.

    Every policy trains with every seed, on the same batches. All policies of a seed run before the next seed, so that
    an interrupted comparison leaves complete pairs. The difference of the metric, policy − baseline, is taken within
    each seed:

        interval = the 95 % interval of the mean difference (Student's t and Hall's for skewed ones, the outer ends)
        equal    if the interval lies within ± the standard deviation of the baseline over seeds (small: without zero)
        worse    if the interval excludes zero, or a run diverged and the baseline's did not
        unclear  otherwise, with the approximate number of seeds needed for a verdict

    Args:
        make: A `MakeTraining`: `(policy, seed) -> (state, step, batches, metric)`.
        policies: Names that `make` interprets; the baseline need not be among them.
        seeds: The number of seeds (0, 1, ...), or the seeds themselves.
        baseline: The reference policy.

    Returns:
        A `ParityReport`. `print` it, or read its `comparisons`.

    Raises:
        ValueError: There are no seeds or policies, or the batches of a seed differ between policies.
        TypeError: `make` does not return a training.

    Example:
        >>> import mpjax
        >>> def make(policy, seed):
        ...     rounding = 0.0 if policy == "float32" else 2.0**-11
        ...     def step(x, batch):
        ...         return 0.5 * x + rounding, x
        ...     return 1.0 + seed / 8, step, range(3), lambda x: 1 - x
        >>> report = mpjax.parity(make, ["mixed_float16"], seeds=3)
        >>> print(report.comparisons[0].kind)
        small

    Source: the paired comparison over seeds of Bouthillier et al., "Accounting for Variance in Machine Learning
        Benchmarks", MLSys 2021; intervals of skewed means by Hall, J. R. Stat. Soc. B 54 (1992).
    """
    numbers = _seeds(seeds)
    others = _policies(policies, baseline)
    runs: dict[str, list[Run]] = {policy: [] for policy in (baseline, *others)}
    for i, seed in enumerate(numbers):
        for policy, done in runs.items():
            done.append(run_training(make_training(make, policy, seed), policy, seed))
            _check_data(done[i], runs[baseline][i])
    comparisons = [_compared(runs[policy], runs[baseline]) for policy in others]
    worse = [found.policy for found in comparisons if found.kind == "worse"]
    evidence = [evidence_of(make, policy, baseline, runs[policy], runs[baseline]) for policy in worse]
    first = runs[baseline][0]
    return ParityReport(
        make=_name(make),
        baseline=baseline,
        seeds=numbers,
        metric_name=first.metric_name,
        larger_is_better=first.larger_is_better,
        percent=first.percent,
        comparisons=tuple(comparisons),
        evidence=tuple(evidence),
        runs=tuple(run for of_seed in zip(*runs.values(), strict=True) for run in of_seed),
    )


def _name(make: Callable[..., Any]) -> str:
    """The name of a function, with the arguments that a `functools.partial` binds."""
    if isinstance(make, functools.partial):
        given = [*map(repr, make.args), *(f"{name}={value!r}" for name, value in make.keywords.items())]
        return f"{_name(make.func)}({', '.join(given)})"
    return getattr(inspect.unwrap(make), "__qualname__", type(make).__name__)


def _seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    found = tuple(range(seeds)) if isinstance(seeds, int) else tuple(int(seed) for seed in seeds)
    if not found or len(set(found)) < len(found):
        raise ValueError(f"parity: seeds={seeds!r}: give a number of seeds, at least 1, or distinct seeds.")
    return found


def _policies(policies: Sequence[str], baseline: str) -> tuple[str, ...]:
    if isinstance(policies, str):
        raise ValueError(f"parity: policies={policies!r} is one string; give a sequence, as [{policies!r}].")
    others = tuple(dict.fromkeys(policy for policy in policies if policy != baseline))
    if not others:
        raise ValueError(f"parity: policies={policies!r}: give at least one that is not the baseline {baseline!r}.")
    return others


def _check_data(run: Run, other: Run) -> None:
    """Raises a ValueError if two runs of a seed had different batches."""
    if other.data != run.data or len(other.losses) != len(run.losses):
        raise ValueError(
            f"parity: seed {run.seed} has other batches under {run.policy!r} ({len(run.losses)} steps) than "
            f"under {other.policy!r} ({len(other.losses)} steps), so the runs are not a pair. make's batches "
            "may depend on the seed alone: not on the policy, nor on the batches that an earlier run consumed."
        )


def _compared(runs: Sequence[Run], base: Sequence[Run]) -> PairedComparison:
    """The verdict on a policy, from its runs and the baseline's by seed."""
    pairs = list(zip(runs, base, strict=True))
    return compare(
        runs[0].policy,
        [run.seed for run in runs],
        [run.metric for run in runs],
        [run.metric for run in base],
        larger_is_better=runs[0].larger_is_better,
        identical=all(math.isfinite(a.metric) and a.metric == b.metric and a.losses == b.losses for a, b in pairs),
    )


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Evidence on why a policy is worse.

    Args:
        policy: The name of the policy.
        seed: The seed of the examined pair of runs, the one with the largest difference.
        parted_at: The first step from which on the loss curves differ beyond noise; None if they do not.
        step: The number of steps of the baseline's run before the gradients were measured.
        loss_scale: The loss scale of the policy's run at that step; None without loss scaling.
        scales: The history of the loss scale in the run of `seed`.
        skipped: The number of skipped steps over all seeds.
        steps: The number of steps over all seeds.
        ranges: `numerics` of the loss at these parameters and this scale: the gradients that half flushes to zero.
        errors: `layerwise_error` of the same; None if nothing is in half.
        notes: Measurements that were not possible, and why.
    """

    policy: str
    seed: int
    parted_at: int | None
    step: int
    loss_scale: float | None
    scales: tuple[tuple[int, float], ...]
    skipped: int
    steps: int
    ranges: NumericsReport | None = None
    errors: LayerwiseReport | None = None
    notes: tuple[str, ...] = ()


def explained(found: Evidence, baseline: str) -> Iterator[Section]:
    """The sections of a printed report: what happened, and the modules."""
    yield Section(f"Why {found.policy} is worse", "\n".join(_evidence_lines(found, baseline)))
    parts = [] if found.ranges is None else [found.ranges.by_module("gradients")]
    parts += [] if found.errors is None else [found.errors.by_module()]
    yield from (dataclasses.replace(part, shown=8) for part in parts)


def _evidence_lines(found: Evidence, baseline: str) -> Iterator[str]:
    if found.parted_at is None:
        yield f"the loss curves do not part from {baseline}'s beyond noise: check what the metric does after training"
    else:
        yield f"the loss curves part from {baseline}'s at step {found.parted_at}, beyond noise from there on"
    scales = [scale for _, scale in found.scales]
    if not scales:
        yield "no loss scaling"
    elif len(scales) == 1:
        yield f"loss scale {scale_text(scales[0])} throughout; {found.skipped} of {found.steps} steps skipped"
    else:
        yield (
            f"loss scale {scale_text(min(scales))} to {scale_text(max(scales))}, {len(scales) - 1} changes, finally "
            f"{scale_text(scales[-1])} (seed {found.seed}); {found.skipped} of {found.steps} steps skipped"
        )
    at = f"at {baseline}'s parameters after {found.step} steps of seed {found.seed}"
    if found.ranges is not None:
        flushed, scale = found.ranges.flushed_at(found.ranges.loss_scale), scale_text(found.ranges.loss_scale)
        yield f"{percent(flushed)} of the activation gradients are flushed to zero at loss scale {scale}, {at}"
    if found.errors is not None:
        worst = sorted(found.errors.parameters, key=lambda row: -row.error)[:3]
        shown = ", ".join(f"{row.name} {percent(row.error)}" for row in worst)
        yield f"error of the gradients of all parameters {percent(found.errors.gradient_error)}; the largest: {shown}"
    yield from found.notes


def evidence_of(
    make: Callable[..., Any], policy: str, baseline: str, runs: Sequence[Run], base_runs: Sequence[Run]
) -> Evidence:
    """Collects evidence on why a policy is worse. It retrains the baseline up to the step of the measurement.

    Args:
        make: A `MakeTraining`.
        policy, baseline: Names that `make` interprets.
        runs, base_runs: The runs of both, by seed.
    """
    run, base = max(zip(runs, base_runs, strict=True), key=lambda pair: _loss_difference(*pair))
    parted = parted_at(runs, base_runs)
    step = min(parted, len(base.losses)) if parted is not None else len(base.losses) // 2
    found = Evidence(
        policy=policy,
        seed=run.seed,
        parted_at=parted,
        step=step,
        loss_scale=next((scale for at, scale in reversed(run.scales) if at <= max(step, 1)), None),
        scales=run.scales,
        skipped=sum(len(each.skipped) for each in runs),
        steps=sum(len(each.losses) for each in runs),
    )
    training = make_training(make, policy, run.seed)
    if training.loss is None:
        why = "give Training(loss=...), the loss in the precision of the policy"
    else:
        try:
            params, batch, found = _params_at(make_training(make, baseline, run.seed), found)
            return _measured(training.loss, params, batch, found)
        except Exception as error:  # The comparison is valid without this evidence.
            why = f"{type(error).__name__}: {error}"
    return dataclasses.replace(found, notes=(f"gradients were not inspected: {why}",))


def _loss_difference(run: Run, base: Run) -> float:
    difference = abs(run.metric - base.metric)
    return difference if math.isfinite(difference) else math.inf


def _params_at(base: Training, found: Evidence) -> tuple[Any, Any, Evidence]:
    """The baseline's parameters after `found.step` steps, and the next batch."""
    state, steps, batch = base.state, 0, None
    for batch in base.each_batch():
        if steps >= found.step:
            break
        state, loss = base.step(state, batch)
        steps += int(np.size(loss))
    return base.params_of(state), batch, dataclasses.replace(found, step=steps)


def _measured(loss: Callable[[Any, Any], Any], params: Any, batch: Any, found: Evidence) -> Evidence:
    scale, errors, notes = found.loss_scale or 1.0, None, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about rules; the training run has already warned
        try:
            errors = layerwise_error(loss, params, batch, loss_scale=scale)
        except ValueError:
            notes.append("Training.loss computes nothing in half: give the one that the policy's step differentiates")
        halves = [dtype for row in errors.modules for dtype in row.dtypes] if errors is not None else []
        dtype = max(("float16", "bfloat16"), key=halves.count)
        ranges = numerics(loss, params, batch, loss_scale=scale, dtype=dtype, verify=False)
    return dataclasses.replace(found, ranges=ranges, errors=errors, notes=tuple(notes))
