"""Loss curves of several seeds: paired differences with intervals, their figure, and where two policies part."""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpjax.inspection.parity.running import Run
from mpjax.inspection.parity.statistics import half_width

if TYPE_CHECKING:
    from mpjax.inspection.parity.report import ParityReport

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


def figure(report: ParityReport) -> Any:
    """The figure of a comparison: the paired differences of the losses, with intervals. Needs Matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not through pyplot: its global state and backend belong to the caller.
    drawn = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(drawn)
    axis = drawn.subplots()
    axis.axhline(0, color="black", linewidth=1)
    policies = dict.fromkeys(run.policy for run in report.runs if run.policy != report.baseline)
    for i, policy in enumerate(policies):
        found = differences(report.runs_of(policy), report.runs_of(report.baseline))
        low, mean, high = (np.where(np.isfinite(values), values, np.nan) for values in found[1:])
        axis.plot(found.steps, mean, color=f"C{i}", label=policy, marker="o" if len(found.steps) == 1 else "")
        axis.fill_between(found.steps, low, high, color=f"C{i}", alpha=0.2, linewidth=0)
    axis.set(title=report.title, xlabel="step", ylabel=f"loss − {report.baseline}'s, mean with 95 % interval")
    axis.legend(frameon=False)
    return drawn


def html(report: ParityReport) -> str:
    """The figure as an HTML element; an empty string without Matplotlib."""
    if not available():
        return ""
    with io.BytesIO() as file:
        figure(report).savefig(file, format="png", dpi=110)
        data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="differences of the losses" style="max-width: 100%" src="data:image/png;base64,{data}">'


def available() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None
