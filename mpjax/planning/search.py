"""The cheapest changes with which a step fits: predicted from single changes, then compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from mpjax.planning.step import Change, Compiled

# Combinations that are compiled after the single changes, before the search takes another way.
_TRIES = 3
# Further combinations that are compiled to lower the peak, for each change.
_STEPS = 2


Combination = tuple[Change, ...]


class Found(NamedTuple):
    """The result of a search.

    Args:
        chosen: The changes.
        fits: Whether the step fits with them. If not, they are those of the least peak found.
    """

    chosen: Combination
    fits: bool


def cheapest(options: Sequence[Change], measure: Callable[[Combination], Compiled], budget: float) -> Found:
    """Finds the changes of the least price with which the peak is within the budget.

        price = work of the step, relative, + the prices of the changes

    Peak and work of a combination are first predicted: those of the step as it is, plus the differences that each
    change makes alone, plus the error of that sum in the largest smaller combination that was compiled. The combination
    with the least price of those predicted to fit is compiled, then the next. Two changes can also lower the peak only
    together, each at its own place of the step: so if these do not fit, all changes that help are compiled together,
    and changed one by one while that lowers the peak. At last each change is taken back or added once, the dearest
    first, if the step still fits and gets cheaper.

    Args:
        options: The changes, of several axes. Those that change nothing are ignored.
        measure: Compiles a combination.
        budget: Bytes.
    """
    base = measure(())
    if base.peak <= budget:
        return Found((), True)
    alone = {change: measure((change,)) for change in options}
    alone = {change: found for change, found in alone.items() if found.program != base.program}
    tried: dict[frozenset[Change], Compiled] = {frozenset(): base}
    tried |= {frozenset({change}): found for change, found in alone.items()}

    def predicted(combination: Combination) -> tuple[float, float]:
        """Bytes at the peak, and the price."""
        known = max((each for each in tried if each <= {*combination}), key=len)
        rest = [alone[change] for change in combination if change not in known]
        peak = tried[known].peak + sum(each.peak - base.peak for each in rest)
        work = tried[known].work + sum(each.work - base.work for each in rest)
        return peak, work / base.work + sum(change.price for change in combination)

    def compiled(combination: Combination) -> bool:
        """Whether the step fits with a combination, which is compiled."""
        key = frozenset(combination)
        tried[key] = tried[key] if key in tried else measure(combination)
        return tried[key].peak <= budget

    best = None
    for _ in range(_TRIES):
        fitting = [each for each in combinations([*alone]) if predicted(each)[0] <= budget]
        cheap = min(fitting, key=lambda each: predicted(each)[1], default=None)
        if cheap is None or compiled(cheap):
            best = cheap
            break
    if best is None:
        best = _lowered(_least(alone, base), alone, compiled, lambda each: tried[frozenset(each)].peak)
    if not compiled(best):
        least = min(tried, key=lambda each: (tried[each].peak, len(each)))
        return Found(_in_order(least, options), False)
    for change in sorted(alone, key=lambda change: predicted((change,))[1], reverse=True):
        other = _toggled(best, change)
        if predicted(other)[1] < predicted(best)[1] and compiled(other):
            best = other if predicted(other)[1] < predicted(best)[1] else best
    return Found(_in_order(best, options), True)


def _lowered(
    start: Combination,
    alone: Collection[Change],
    compiled: Callable[[Combination], bool],
    peak: Callable[[Combination], int],
) -> Combination:
    """Adds, replaces and takes back one change at a time while that lowers the peak, until the step fits."""
    best, unsuccessful = start, 0
    if compiled(best):
        return best
    for change in itertools.islice(itertools.cycle(alone), _STEPS * len(alone)):
        if unsuccessful == len(alone):
            break
        other = _toggled(best, change)
        fits = compiled(other)
        unsuccessful = 0 if peak(other) < peak(best) else unsuccessful + 1
        best = best if unsuccessful else other
        if fits:
            break
    return best


def _toggled(changes: Combination, change: Change) -> Combination:
    """The changes without one of them, or with one more, in place of another of its axis."""
    kept = tuple(each for each in changes if each.axis != change.axis)
    return kept if change in changes else (*kept, change)


def _in_order(changes: Iterable[Change], options: Sequence[Change]) -> Combination:
    return tuple(change for change in options if change in {*changes})


def _least(alone: dict[Change, Compiled], base: Compiled) -> Combination:
    """The change of each axis with the least peak, if it does not raise it."""
    by_axis = itertools.groupby(alone, key=lambda change: change.axis)
    best = [min(changes, key=lambda change: alone[change].peak) for _, changes in by_axis]
    return tuple(change for change in best if alone[change].peak <= base.peak)


def combinations(options: Sequence[Change]) -> Iterator[Combination]:
    """All combinations of changes with one of an axis at most, that of none included."""
    axes = [(None, *changes) for _, changes in itertools.groupby(options, key=lambda change: change.axis)]
    for chosen in itertools.product(*axes):
        yield tuple(change for change in chosen if change is not None)


def largest_batch(peak: Callable[[int], float], budget: float, start: int, unit: int = 1) -> int:
    """The largest batch that fits, a multiple of `unit`, to one in 64; 0 if none does.

    Memory grows with the batch, almost in proportion: each size is where the line through the two nearest to the
    budget meets it, within the bounds found so far; every third one halves them, so that any growth ends.

    Args:
        peak: The bytes at the peak with a batch.
        budget: Bytes.
        start: The first batch that is tried.

    Example:
        >>> largest_batch(lambda batch: 1000 + 7 * batch, 1290, 8)
        41
    """
    low, high, size = 0, 0, max(start // unit, 1)
    known: dict[int, float] = {}
    while not high or high - low > max(1, low // 64):
        known[size] = peak(size * unit)
        low, high = (size, high) if known[size] <= budget else (low, size)
        most = high - 1 if high else 4 * low
        if len(known) == 1 or len(known) % 3 == 0:
            size = (low + high) // 2 if high else 2 * low
        else:
            a, b = sorted(known, key=lambda each: abs(known[each] - budget))[:2]
            slope = (known[a] - known[b]) / (a - b)
            size = int(a + (budget - known[a]) / slope) if slope > 0 else most
        size = min(max(size, low + 1), max(most, 1))
    return low * unit
