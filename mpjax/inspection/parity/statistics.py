"""Paired differences over few seeds: their interval, and the verdict in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy.special

Kind = Literal["equal", "worse", "better", "unclear"]

CONFIDENCE = 0.95
# With fewer seeds a 95 % interval means little: Student's factor for two differences is 12.7, and for equal ones the
# interval has no width.
FEWEST_SEEDS = 3
_MOST_SEEDS = 1000
_RESAMPLES = 10_000


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

        Student's t             mean ± t(n−1) sd / √n
        expanded bootstrap      percentiles α', 1 − α' of resampled means, α' = Φ(−t(n−1) √(n/(n−1)))

    With few seeds the plain percentile bootstrap is much too narrow. For n = 3 it covers the mean in 3 of 4 cases at
    best, because no resampled mean lies outside of the differences. Student's interval alone assumes symmetry. For n
    below 6 Student's ends are nearly always the outer ones. With more seeds and skewed differences the outer ends are
    the bootstrap's.

    Args:
        differences: One for each seed; with fewer than two the interval is infinite.

    Source: the expanded percentile interval of Hesterberg, "What Teachers Should Know About the Bootstrap",
        The American Statistician 69 (2015).

    Example:
        >>> paired_interval([0.1, 0.2, 0.3])
        Interval(low=-0.048..., mean=0.2..., high=0.448...)
    """
    values = np.asarray(differences, np.float64)
    n, mean = len(values), float(np.mean(values)) if len(values) else math.nan
    if n < 2:
        return Interval(-math.inf, mean, math.inf)
    if np.all(values == values[0]):
        return Interval(float(values[0]), float(values[0]), float(values[0]))
    half = half_width(n, values.std(ddof=1))
    tail = float(scipy.special.ndtr(-_student(n) * math.sqrt(n / (n - 1))))
    resampled = values[np.random.default_rng(0).integers(0, n, (_RESAMPLES, n))].mean(axis=1)
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(float(min(mean - half, low)), mean, float(max(mean + half, high)))


def half_width(n: int, deviation: Any) -> Any:
    """Half the width of Student's interval for the mean of n numbers; `deviation` is a number or an array."""
    return _student(n) * deviation / math.sqrt(n)


def _student(n: int) -> float:
    return float(scipy.special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The comparison of a policy with the baseline.

    Args:
        policy: The name of the policy.
        seeds: The seeds of the pairs.
        differences: The metric of the policy minus that of the baseline, by seed.
        interval: The confidence interval of the mean difference.
        noise: The standard deviation of the baseline's metric over seeds.
        kind: The verdict.
        diverged: Seeds in which the policy's metric is not finite and the baseline's is.
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
    diverged: tuple[int, ...] = ()
    identical: bool = False
    seeds_needed: int | None = None

    def verdict(self, percent: bool = False, unit: str = "") -> str:
        """The verdict in words."""
        factor, unit = (100.0, "points") if percent else (1.0, unit)
        if self.diverged:
            return f"worse: {len(self.diverged)} of {len(self.seeds)} runs diverged"
        if self.identical:
            return "equal: identical in every seed"
        if self.kind == "equal":
            return "equal within seed noise"
        if self.kind == "unclear":
            needed = f"more than {_MOST_SEEDS}" if self.seeds_needed is None else f"about {self.seeds_needed}"
            return f"not enough seeds to tell: needs {needed}"
        size, margin = factor * abs(self.interval.mean), factor * self.interval.margin
        return f"{self.kind} by {rounded(size, margin)} ± {rounded(margin, margin)} {unit}".rstrip()


def compare(
    policy: str,
    seeds: Sequence[int],
    metrics: Sequence[float],
    baseline: Sequence[float],
    *,
    larger_is_better: bool = True,
    identical: bool = False,
) -> Comparison:
    """Compares a policy with the baseline. The verdict is the first of these that holds:

        worse     a run diverged (its metric is not finite) where the baseline's did not
        equal     identical to the baseline in every seed; or at least three seeds, and the 95 % interval of the mean
                  paired difference lies within ± the standard deviation of the baseline's metric over seeds
        worse, better   at least three seeds, and the interval excludes zero
        unclear   otherwise

    Args:
        policy: The name of the policy.
        seeds: The seed of each pair.
        metrics, baseline: The metric for each seed; pairs whose baseline is not finite do not count.
        larger_is_better: Whether larger values of the metric are better.
        identical: Whether all runs equal the baseline's to the last bit.

    Example:
        >>> found = compare("mixed_float16", range(4), [0.90, 0.91, 0.89, 0.90], [0.95, 0.96, 0.94, 0.95])
        >>> found.kind, found.verdict(percent=True)
        ('worse', 'worse by 5.0000 ± 0.0000 points')
    """
    pairs = [(s, m, b) for s, m, b in zip(seeds, metrics, baseline, strict=True) if math.isfinite(b)]
    diverged = tuple(s for s, m, _ in pairs if not math.isfinite(m))
    finite = [(m, b) for _, m, b in pairs if math.isfinite(m)]
    differences = tuple(m - b for m, b in finite)
    values = [b for _, _, b in pairs]
    noise = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    interval = paired_interval(differences)
    enough = len(differences) >= FEWEST_SEEDS
    kind: Kind = "unclear"
    if diverged:
        kind = "worse"
    elif (identical and pairs) or (enough and -noise <= interval.low and interval.high <= noise):
        kind = "equal"
    elif enough and (interval.low > 0 or interval.high < 0):
        kind = "better" if (interval.mean > 0) == larger_is_better else "worse"
    needed = _seeds_needed(differences, noise) if kind == "unclear" else None
    kept = tuple(s for s, _, _ in pairs)
    return Comparison(policy, kept, differences, interval, noise, kind, diverged, identical, needed)


def _seeds_needed(differences: Sequence[float], noise: float) -> int | None:
    """The fewest seeds, more than there are, that would give a verdict with the same mean and deviation."""
    n = len(differences)
    if n < 2:
        return FEWEST_SEEDS
    mean, deviation = abs(float(np.mean(differences))), float(np.std(differences, ddof=1))
    for more in range(max(n + 1, FEWEST_SEEDS), _MOST_SEEDS + 1):
        half = half_width(more, deviation)
        if mean + half <= noise or mean - half > 0:
            return more
    return None


def rounded(value: float, margin: float) -> str:
    """A number with the digits that its margin permits: two significant digits of the margin.

    Example:
        >>> rounded(0.41273, 0.12), rounded(41.273, 3.0), rounded(5.0, 0.0)
        ('0.41', '41.3', '5.0000')
    """
    if not math.isfinite(margin) or not margin:
        return f"{value:.4f}"
    return f"{value:.{min(max(1 - math.floor(math.log10(margin)), 0), 12)}f}"
