"""Each verdict on numbers whose answer is known."""

import numpy as np
import pytest
import scipy  # which imports its packages when they are used

from mpjax.inspection.comparison.statistics import Interval, compare, paired_interval

BASE = [0.90, 0.92, 0.94, 0.96, 0.98]  # standard deviation 0.0316


def shifted(*differences, base=BASE, **kwargs):
    base = base[: len(differences)]
    return compare("half", range(len(base)), [b + d for b, d in zip(base, differences, strict=True)], base, **kwargs)


def test_identical_runs_are_equal_with_a_difference_of_exactly_zero():
    found = shifted(0, 0, identical=True)
    assert found.interval == Interval(0, 0, 0)
    assert found.kind == "equal"
    assert found.verdict() == "equal: identical in every seed"


def test_an_interval_inside_the_noise_is_equal():
    found = shifted(0.001, -0.002, 0.002, -0.001, 0.0)
    assert found.noise == pytest.approx(np.std(BASE, ddof=1))
    assert -found.noise < found.interval.low < 0 < found.interval.high < found.noise
    assert found.verdict() == "equal within seed noise: 0.0000 ± 0.0020, noise 0.0316"


def test_a_difference_inside_the_noise_is_not_equal_if_it_is_certain():
    found = shifted(-0.010, -0.011, -0.009, -0.010, -0.010)
    assert found.kind == "small"
    assert found.verdict() == "smaller than seed noise, but different: -0.01000 ± 0.00088, noise 0.03162"


def test_a_difference_beyond_the_noise_is_worse_by_its_mean_and_margin():
    found = shifted(-0.05, -0.06, -0.05, -0.06, -0.055)
    half = scipy.stats.t.ppf(0.975, 4) * np.std(found.differences, ddof=1) / 5**0.5
    assert found.interval.margin == pytest.approx(half)
    assert found.verdict(percent=True) == "worse by 5.50 ± 0.62 points"
    assert found.verdict(unit="of accuracy") == "worse by 0.0550 ± 0.0062 of accuracy"


def test_the_direction_is_that_of_the_metric():
    up = [0.05, 0.06, 0.05, 0.06, 0.055]
    assert shifted(*up).kind == "better"
    assert shifted(*up, larger_is_better=False).kind == "worse"
    assert shifted(*up).verdict(percent=True) == "better by 5.50 ± 0.62 points"


def test_an_interval_with_zero_that_leaves_the_noise_needs_more_seeds():
    found = shifted(0.05, -0.06, 0.04, -0.05, 0.0)
    assert found.kind == "unclear"
    assert found.verdict() == f"not enough seeds to tell: needs about {found.seeds_needed}"


def test_the_number_of_seeds_that_is_said_would_tell():
    rng = np.random.default_rng(0)
    found = shifted(0.05, -0.06, 0.04, -0.05, 0.0)
    # That many differences, and fewer, of the same mean and deviation, with a baseline of the same noise.
    for n, kind in ((found.seeds_needed, "equal"), (found.seeds_needed - 2, "unclear")):
        base = scipy.stats.zscore(rng.normal(size=n), ddof=1)
        differences = scipy.stats.zscore(np.arange(n), ddof=1)  # not skewed
        differences = differences * np.std(found.differences, ddof=1) + np.mean(found.differences)
        base = base * found.noise + 0.9
        assert compare("half", range(n), base + differences, base).kind == kind


def test_one_or_two_seeds_never_tell():
    assert shifted(-0.5).verdict() == "not enough seeds to tell: needs about 3"
    assert shifted(-0.5, -0.5).kind == "unclear"
    assert shifted(0.0).kind == "unclear", "an equal metric alone is not an identical run"


def test_a_difference_that_no_number_of_seeds_resolves_is_said():
    base = [0.9, 0.9, 0.9]  # no noise: nothing but zero is inside of it
    found = shifted(0.1, -0.1, 0.0001, base=base)
    assert found.verdict() == "not enough seeds to tell: needs more than 1000"


def test_a_diverged_run_is_worse_and_the_others_have_a_verdict():
    found = shifted(0.0, 0.001, float("nan"), -0.001, float("inf"))
    assert found.diverged == (2, 4)
    assert found.verdict().startswith(
        "worse: 2 of 5 runs diverged; the others: equal within seed noise: 0.0000 ± 0.002"
    )
    assert found.differences == pytest.approx((0.0, 0.001, -0.001))


@pytest.mark.parametrize("larger_is_better", [True, False])
def test_a_run_far_behind_the_others_is_counted_as_diverged(larger_is_better):
    sign = 1 if larger_is_better else -1
    found = shifted(*(sign * d for d in (0.001, -0.5, 0.0, -0.001, 0.002)), larger_is_better=larger_is_better)
    assert found.diverged == (1,)
    assert found.verdict().startswith("worse: 1 of 5 runs diverged; the others: equal")
    assert (
        shifted(*(-sign * d for d in (0.001, -0.5, 0.0, -0.001, 0.002)), larger_is_better=larger_is_better).kind
        != "worse"
    )


def test_where_one_run_in_five_fails_no_comparison_is_called_equal():
    rng = np.random.default_rng(0)
    for _ in range(100):
        differences = np.where(rng.random(5) < 0.2, -0.5, rng.normal(0, 0.002, 5))
        found = shifted(*differences)
        failed = (differences < -0.4).sum()
        assert (found.kind == "worse") == (failed > 0) or failed > 2
        assert len(found.diverged) == failed or failed > 2


def test_pairs_without_a_baseline_do_not_count():
    found = compare("half", range(4), [0.9, 0.8, 0.7, 0.6], [0.9, 0.8, 0.7, float("nan")])
    assert found.seeds == (0, 1, 2)
    assert found.kind == "equal"
    assert found.verdict().endswith("; without 1 in which the baseline diverged")


DRAWS = {"normal": 0.0, "exponential": 1.0, "lognormal": np.exp(0.5)}


# The coverage that the documentation states, less three standard deviations of 2000 draws.
COVERED = {"normal": (0.95, 0.95, 0.94), "exponential": (0.91, 0.91, 0.925), "lognormal": (0.875, 0.865, 0.89)}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_interval_covers_the_mean_of_skewed_differences_too(n, draw):
    rng = np.random.default_rng(n)
    covered = student = 0
    for _ in range(2000):
        x = getattr(rng, draw)(size=n)
        low, _, high = paired_interval(x)
        covered += low <= DRAWS[draw] <= high
        student += abs(x.mean() - DRAWS[draw]) <= scipy.stats.t.ppf(0.975, n - 1) * x.std(ddof=1) / n**0.5
    assert covered / 2000 > COVERED[draw][[3, 5, 10].index(n)]
    if draw != "normal":
        assert covered > student + 60


@pytest.mark.parametrize(("n", "most"), [(3, 0.03), (5, 0.015), (10, 0.006)])
def test_noise_is_rarely_called_a_diverged_run(n, most):
    rng = np.random.default_rng(n)
    diverged = 0
    for _ in range(2000):
        base = rng.normal(size=n)
        diverged += bool(compare("half", range(n), base + rng.normal(size=n), base).diverged)
    assert diverged / 2000 < most
