"""Loss curves of several seeds: their means with intervals, and the step at which two policies part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpjax.inspection.parity.running import Run
from mpjax.inspection.parity.statistics import half_width

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
    found = np.empty((len(runs), len(ends)))
    for row, run in zip(found, runs, strict=True):
        for i, part in enumerate(np.split(np.asarray(run.losses[:steps]), ends[:-1])):
            finite = part[np.isfinite(part)]
            row[i] = finite.mean() if finite.size else np.inf
    return ends, found


def band(steps: np.ndarray, values: np.ndarray) -> Band:
    """The interval of the mean over runs at each point; for a single run the mean only."""
    n = len(values)
    with np.errstate(invalid="ignore"):
        mean = values.mean(axis=0)
        half = np.zeros_like(mean)
        if n > 1:
            half = half_width(n, values.std(axis=0, ddof=1))
    return Band(steps, mean - half, mean, mean + half)


def differences(runs: Sequence[Run], baseline: Sequence[Run]) -> Band:
    """The loss of a policy minus the loss of the baseline, paired by seed."""
    steps, ours = losses(runs)
    _, theirs = losses(baseline)
    with np.errstate(invalid="ignore"):
        found = ours - theirs
    # If both are infinite, the difference is unknown; report none.
    return band(steps, np.where(np.isinf(ours) & np.isinf(theirs), 0.0, found))


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
