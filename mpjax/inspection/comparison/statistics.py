"""Paired differences over few seeds: their interval, the verdict in words, and where two loss curves part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy.special

from mpjax.inspection.comparison.training import Run

Kind = Literal["equal", "small", "worse", "better", "unclear"]

CONFIDENCE = 0.95
# With fewer seeds a 95 % interval means little: Student's factor for two differences is 12.7, and for equal ones the
# interval has no width.
FEWEST_SEEDS = 3
_MOST_SEEDS = 1000


class Interval(NamedTuple):
    """A mean with its confidence interval."""

    low: float
    mean: float
    high: float

    @property
    def margin(self) -> float:
        """The distance from the mean to its farther end."""
        return max(self.high - self.mean, self.mean - self.low)


def paired_interval(differences: Sequence[float]) -> Interval:
    """The 95 % interval of the mean of paired differences: the outer ends of two intervals.

        Student's t    mean ± t(n−1) sd / √n
        Hall's         mean − sd g⁻¹(± t(n−1) / √n),  g⁻¹(y) = 3 (∛(1 + γ (y − γ / 6n)) − 1) / γ,  γ the skewness

    Student's interval assumes symmetry. Of 5, 10 and 20 exponential numbers it covers the mean in 88, 90 and 92 %, the
    outer ends in 93, 94 and 96 %; of lognormal ones 82, 84 and 87 %, and 89, 91 and 93 %. Of normal numbers both cover
    at least 95 %.

    Args:
        differences: One for each seed; with fewer than two the interval is infinite.

    Source: Hall, "On the Removal of Skewness by Transformation", Journal of the Royal Statistical Society B 54 (1992).

    Example:
        >>> paired_interval([0.1, 0.2, 0.3])
        Interval(low=-0.048..., mean=0.2..., high=0.448...)
    """
    values = np.asarray(differences, np.float64)
    n, mean = len(values), float(np.mean(values)) if len(values) else math.nan
    if n < 2:
        return Interval(-math.inf, mean, math.inf)
    deviation = values.std(ddof=1)
    half = half_width(n, deviation)
    skewness = float(np.mean((values - mean) ** 3) / values.std() ** 3) if half else 0.0
    if abs(skewness) < 1e-6:
        return Interval(float(mean - half), mean, float(mean + half))
    shifted = skewness * (np.array([1, -1]) * half / deviation - skewness / (6 * n))
    low, high = mean - deviation * 3 * (np.cbrt(1 + shifted) - 1) / skewness
    return Interval(float(min(mean - half, low)), mean, float(max(mean + half, high)))


def half_width(n: int, deviation: Any) -> Any:
    """Half the width of Student's interval for the mean of n numbers; `deviation` is a number or an array."""
    return float(scipy.special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * deviation / math.sqrt(n)


@dataclasses.dataclass(frozen=True)
class PairedComparison:
    """The comparison of a policy with the baseline.

    Args:
        policy: The name of the policy.
        seeds: The seeds of the pairs.
        differences: The metric of the policy minus that of the baseline, by seed.
        interval: The confidence interval of the mean difference.
        noise: The standard deviation of the baseline's metric over seeds.
        kind: The verdict. `"small"` is a difference whose interval excludes zero but lies within the noise.
        others: The verdict on the pairs that did not diverge.
        diverged: Seeds in which the policy's run diverged and the baseline's did not: its metric is not finite, or
            behind the other seeds by more than ten times their median deviation and three times the noise. These pairs
            are not in `differences`, because no interval of a few seeds covers rare failures.
        excluded: Seeds in which the baseline's run diverged; not in `seeds`.
        identical: Whether metric and losses equal the baseline's to the last bit in every seed.
        seeds_needed: The approximate number of seeds needed for a verdict. None if there is a verdict, or if 1000 seeds
            do not suffice.
    """

    policy: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    interval: Interval
    noise: float
    kind: Kind
    others: Kind
    diverged: tuple[int, ...] = ()
    excluded: tuple[int, ...] = ()
    identical: bool = False
    seeds_needed: int | None = None

    def verdict(self, percent: bool = False, unit: str = "") -> str:
        """The verdict in words."""
        text = self._of_finite(*((100.0, "points") if percent else (1.0, unit)))
        if self.diverged:
            others = f"; the others: {text}" if self.differences else ""
            text = f"worse: {len(self.diverged)} of {len(self.seeds)} runs diverged{others}"
        return text + (f"; without {len(self.excluded)} in which the baseline diverged" if self.excluded else "")

    def _of_finite(self, factor: float, unit: str) -> str:
        """The verdict on the pairs that did not diverge."""
        if self.identical:
            return "equal: identical in every seed"
        mean, margin = factor * self.interval.mean, factor * self.interval.margin
        if math.isfinite(margin):
            signed = f"{rounded(mean, margin)} ± {rounded(margin, margin)} {unit}".rstrip()
        if self.others in ("equal", "small"):
            words = "equal within seed noise" if self.others == "equal" else "smaller than seed noise, but different"
            return f"{words}: {signed}, noise {rounded(factor * self.noise, margin)}"
        if self.others == "unclear":
            needed = f"more than {_MOST_SEEDS}" if self.seeds_needed is None else f"about {self.seeds_needed}"
            return f"not enough seeds to tell: needs {needed}"
        return f"{self.others} by {signed.removeprefix('-')}"


def compare(
    policy: str,
    seeds: Sequence[int],
    metrics: Sequence[float],
    baseline: Sequence[float],
    *,
    larger_is_better: bool = True,
    identical: bool = False,
) -> PairedComparison:
    """Compares a policy with the baseline. The verdict is the first of these that holds:

        worse     a run diverged where the baseline's did not
        equal     identical to the baseline in every seed; or at least three seeds, and the 95 % interval of the mean
                  paired difference lies within ± the standard deviation of the baseline's metric over seeds
        small     the same, but the interval excludes zero
        worse, better   at least three seeds, and the interval excludes zero
        unclear   otherwise

    Args:
        policy: The name of the policy.
        seeds: The seed of each pair.
        metrics, baseline: The metric for each seed; not finite for a run that diverged.
        larger_is_better: Whether larger values of the metric are better.
        identical: Whether all runs equal the baseline's to the last bit.

    Example:
        >>> found = compare("mixed_float16", range(4), [0.90, 0.91, 0.89, 0.90], [0.95, 0.96, 0.94, 0.95])
        >>> found.kind, found.verdict(percent=True)
        ('worse', 'worse by 5.0000 ± 0.0000 points')
    """
    pairs = list(zip(seeds, metrics, baseline, strict=True))
    excluded = tuple(s for s, _, b in pairs if not math.isfinite(b))
    pairs = [pair for pair in pairs if math.isfinite(pair[2])]
    diverged = tuple(s for s, m, _ in pairs if not math.isfinite(m))
    values = [b for _, _, b in pairs]
    noise = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    finite = {s: m - b for s, m, b in pairs if math.isfinite(m)}
    diverged += _far_behind(finite, noise, 1 if larger_is_better else -1)
    differences = tuple(difference for s, difference in finite.items() if s not in diverged)
    interval = paired_interval(differences)
    differs, enough = interval.low > 0 or interval.high < 0, len(differences) >= FEWEST_SEEDS
    others: Kind = "unclear"
    if identical and pairs:
        others = "equal"
    elif enough and -noise <= interval.low and interval.high <= noise:
        others = "small" if differs else "equal"
    elif enough and differs:
        others = "better" if (interval.mean > 0) == larger_is_better else "worse"
    return PairedComparison(
        policy=policy,
        seeds=tuple(s for s, _, _ in pairs),
        differences=differences,
        interval=interval,
        noise=noise,
        kind="worse" if diverged else others,
        others=others,
        diverged=diverged,
        excluded=excluded,
        identical=identical,
        seeds_needed=_seeds_needed(differences, noise) if others == "unclear" else None,
    )


def _far_behind(differences: Mapping[int, float], noise: float, sign: int) -> tuple[int, ...]:
    """The seeds whose difference is far worse than those of the other seeds.

    Both factors are chosen so that a difference that is only noise is rarely called a failure: if half precision
    changes a run as much as another seed does, in 2 % of comparisons of 3 seeds and 1 % of 5 (normal differences).
    """
    if len(differences) < FEWEST_SEEDS:
        return ()
    values = sign * np.asarray(list(differences.values()))
    behind = np.median(values) - values
    limit = max(10 * float(np.median(np.abs(behind))), 3 * noise)
    return tuple(seed for seed, far in zip(differences, behind > limit, strict=True) if far)


def _seeds_needed(differences: Sequence[float], noise: float) -> int | None:
    """The fewest seeds, more than there are, that would give a verdict with the same mean and deviation."""
    n = len(differences)
    if n < 2:
        return FEWEST_SEEDS
    mean, deviation = abs(float(np.mean(differences))), float(np.std(differences, ddof=1))
    halves = {more: half_width(more, deviation) for more in range(max(n + 1, FEWEST_SEEDS), _MOST_SEEDS + 1)}
    return next((more for more, half in halves.items() if mean + half <= noise or mean - half > 0), None)


def rounded(value: float, margin: float) -> str:
    """A number with the digits that its margin permits: two significant digits of the margin.

    Example:
        >>> rounded(0.41273, 0.12), rounded(41.273, 3.0), rounded(5.0, 0.0)
        ('0.41', '41.3', '5.0000')
    """
    if not math.isfinite(margin) or not margin:
        return f"{value:.4f}"
    return f"{value:.{min(max(1 - math.floor(math.log10(margin)), 0), 12)}f}"


_WINDOWS = 50  # at most; all of about the same number of steps
_DIFFERING_SHARE = 0.9  # curves that have parted differ in at least this share of the windows from there on


class Band(NamedTuple):
    """The mean of a quantity over seeds along a run, with its 95 % interval (Student's t) at each point."""

    steps: np.ndarray  # shape (points,), the last step of each window
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray


def losses(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray]:
    """Mean losses in windows of steps.

    Returns:
        The last step of each window, and an array of shape (runs, windows), with inf for windows without a finite
        loss.
    """
    steps = min(len(run.losses) for run in runs)
    ends = np.unique(np.linspace(0, steps, min(_WINDOWS, steps) + 1).round().astype(int))[1:]

    def mean(window: np.ndarray) -> float:
        finite = window[np.isfinite(window)]
        return float(finite.mean()) if finite.size else math.inf

    return ends, np.array([[*map(mean, np.split(np.asarray(run.losses[:steps]), ends[:-1]))] for run in runs])


def differences(runs: Sequence[Run], baseline: Sequence[Run]) -> Band:
    """The loss of a policy minus the loss of the baseline, paired by seed; for a single run the mean only."""
    (steps, ours), (_, theirs) = losses(runs), losses(baseline)
    with np.errstate(invalid="ignore"):
        # If both are infinite, the difference is unknown; report none.
        values = np.where(np.isinf(ours) & np.isinf(theirs), 0.0, ours - theirs)
        mean = values.mean(axis=0)
        half = half_width(len(values), values.std(axis=0, ddof=1)) if len(values) > 1 else np.zeros_like(mean)
    return Band(steps, mean - half, mean, mean + half)


def parted_at(runs: Sequence[Run], baseline: Sequence[Run]) -> int | None:
    """The first step of the first window from which on the losses differ beyond noise.

    The 95 % interval of the paired difference excludes zero in that window, and on the same side in at least nine of
    ten windows from there on. None if there is no such window.
    """
    found = differences(runs, baseline)
    starts = [0, *found.steps[:-1]]
    # A mean of infinite losses has no interval (inf − inf is NaN), but does differ.
    above = (found.low > 0) | (found.mean == np.inf)
    for differs in (above, found.high < 0):
        shares = np.cumsum(differs[::-1])[::-1] / np.arange(len(differs), 0, -1)
        for start, here, share in zip(starts, differs, shares, strict=True):
            if here and share >= _DIFFERING_SHARE:
                return int(start) + 1
    return None
