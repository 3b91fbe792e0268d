"""The cheapest changes with which a step fits: predicted from single changes, then compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from mpjax.planning.step import Change

# Combinations that are compiled after the single changes, before the search takes another way.
_TRIES = 3
# A change that raises the peak by no more than this may lower it with others.
_NEAR = 1.05


class Measured(Protocol):
    """What is known of a compiled combination: bytes at the peak, and work."""

    peak: int
    work: float
    program: str


Combination = tuple[Change, ...]
Measure = Callable[[Combination], Measured]


class Found(NamedTuple):
    """The result of a search.

    Args:
        chosen: The changes.
        fits: Whether the step fits with them. If not, they are those of the least peak found.
    """

    chosen: Combination
    fits: bool


def cheapest(options: Sequence[Change], measure: Measure, budget: float) -> Found:
    """Finds the changes of the least price with which the peak is within the budget.

        price = work of the step, relative, + the prices of the changes

    Peak and work of a combination are first predicted: those of the step as it is, plus the differences that each
    change makes alone, plus the error of that sum in the largest smaller combination that was compiled. The combination
    with the least price of those predicted to fit is compiled, then the next. Two changes can also lower the peak only
    together, each at its own place of the step: so if these do not fit, all changes that help are compiled together.
    Others are added where they help then, and what is not needed is taken back, the dearest first.

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
    tried: dict[frozenset[Change], Measured] = {frozenset(): base}
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
        tried[frozenset(combination)] = measure(combination)
        return tried[frozenset(combination)].peak <= budget

    for _ in range(_TRIES):
        fitting = [each for each in combinations([*alone]) if predicted(each)[0] <= budget]
        best = min(fitting, key=lambda each: predicted(each)[1], default=None)
        if best is None:
            break
        if compiled(best):
            return Found(best, True)
    best = _least(alone, base)
    fits = compiled(best)
    for change in alone:  # that lower the peak with others, though not alone
        if not fits and change not in best and alone[change].peak <= _NEAR * base.peak:
            other = (*(each for each in best if each.axis != change.axis), change)
            fits = compiled(other)
            best = other if tried[frozenset(other)].peak < tried[frozenset(best)].peak else best
    for change in sorted(best, key=lambda change: predicted((change,))[1], reverse=True):
        rest = tuple(each for each in best if each is not change)
        if compiled(rest) or (not fits and tried[frozenset(rest)].peak <= tried[frozenset(best)].peak):
            best = rest
    if not fits:
        least = min(tried, key=lambda each: (tried[each].peak, len(each)))
        best = tuple(change for change in options if change in least)
    return Found(tuple(change for change in options if change in best), fits)


def _least(alone: dict[Change, Measured], base: Measured) -> Combination:
    """The change of each axis with the least peak, if it does not raise it."""
    by_axis = itertools.groupby(alone, key=lambda change: change.axis)
    best = [min(changes, key=lambda change: alone[change].peak) for _, changes in by_axis]
    return tuple(change for change in best if alone[change].peak <= base.peak)


def combinations(options: Sequence[Change]) -> Iterator[Combination]:
    """All combinations of changes with one of an axis at most, that of none included."""
    axes = [(None, *changes) for _, changes in itertools.groupby(options, key=lambda change: change.axis)]
    for chosen in itertools.product(*axes):
        yield tuple(change for change in chosen if change is not None)


def largest_batch(fits: Callable[[int], bool], start: int, unit: int = 1) -> int:
    """The largest batch that fits, a multiple of `unit`, to one in 64; 0 if none does.

    Doubles or halves from `start`, then bisects: the memory of a step grows with its batch.

    Example:
        >>> largest_batch(lambda batch: batch <= 37, 8)
        37
    """
    low, high = 0, max(start // unit, 1)
    while fits(high * unit):
        low, high = high, 2 * high
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit
