"""The search for the cheapest changes, on models of memory in which each combination is known."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from mpjax.planning.search import cheapest, combinations, largest_batch
from mpjax.planning.step import CHECKPOINT, DONATE, LOW_BIT, Change

OPTIONS = [
    Change("attention", "fused"),
    Change("cross_entropy", "fused"),
    Change("residuals", "half"),
    Change("residuals", "full"),
    Change("residual_stream", "float32"),
    CHECKPOINT,
    DONATE,
    LOW_BIT,
]


class Known(NamedTuple):
    peak: int
    work: float
    program: str


def model_of(seed):
    """A step with three places of which the largest is the peak; each change adds to some of them."""
    rng = random.Random(seed)
    places = [rng.randrange(50, 100) for _ in range(3)]
    effects = {c: [rng.choice((0, 0, -20, -10, 5)) for _ in places] for c in OPTIONS}
    works = {c: rng.choice((0.0, 0.0, 0.05, 0.2, -0.02)) for c in OPTIONS}
    calls = []

    def measure(changes):
        calls.append(changes)
        sums = [p + sum(effects[c][i] for c in changes) for i, p in enumerate(places)]
        name = (
            ""
            if all(effects[c] == [0] * 3 and works[c] == 0 for c in changes)
            else str(sorted(c.name for c in changes))
        )
        return Known(max(*sums, 5), 1 + sum(works[c] for c in changes), name)

    return measure, calls


def price(measure, changes):
    return measure(changes).work + sum(change.price for change in changes)


def test_combinations_have_one_change_of_an_axis():
    found = [*combinations(OPTIONS)]
    assert len(found) == len({*map(frozenset, found)}) == 2 * 2 * 3 * 2 * 2 * 2 * 2
    assert all(len({change.axis for change in each}) == len(each) for each in found)


MODELS = range(60)


def test_least_peak_is_near_that_of_an_exhaustive_search():
    near = 0
    for seed in MODELS:
        measure, calls = model_of(seed)
        found = cheapest(OPTIONS, measure, 1)
        assert not found.fits
        assert len({*map(frozenset, calls)}) <= 1 + 4 * len(OPTIONS)
        near += measure(found.chosen).peak <= 1.05 * min(measure(each).peak for each in combinations(OPTIONS))
    assert near >= 0.9 * len(MODELS)


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_what_is_chosen_fits_if_anything_does(share):
    feasible = fits = cheap = 0
    for seed in MODELS:
        measure, calls = model_of(seed)
        budget = share * measure(()).peak
        calls.clear()
        found = cheapest(OPTIONS, measure, budget)
        assert len({*map(frozenset, calls)}) <= 1 + 4 * len(OPTIONS)
        assert found.fits == (measure(found.chosen).peak <= budget)
        prices = [price(measure, each) for each in combinations(OPTIONS) if measure(each).peak <= budget]
        feasible += bool(prices)
        fits += bool(prices) and found.fits
        cheap += bool(prices) and found.fits and price(measure, found.chosen) <= 1.1 * min(prices)
    assert fits >= 0.95 * feasible > 0
    assert cheap >= 0.8 * feasible


def test_a_step_that_fits_needs_nothing_and_compiles_nothing_more():
    measure, calls = model_of(0)
    assert cheapest(OPTIONS, measure, 1000) == ((), True)
    assert calls == [()]


def test_changes_that_help_only_together_are_found():
    attention, loss = OPTIONS[:2]

    def measure(changes):
        return Known(max(100 - 40 * (attention in changes), 100 - 30 * (loss in changes)), 1.0, str(changes))

    assert cheapest([attention, loss], measure, 75) == ((attention, loss), True)


@pytest.mark.parametrize("most", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("growth", [0, 0.5])
def test_largest_batch(most, unit, growth):
    asked = []

    def peak(batch):
        asked.append(batch)
        return 100 + 3 * batch + growth * batch**2

    assert largest_batch(peak, peak(most), 8, unit) == most // unit * unit
    assert all(batch % unit == 0 for batch in asked[1:])
    assert len(asked) <= 9
