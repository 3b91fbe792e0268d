"""The figure of a comparison: loss curves, differences with their intervals, loss scales. Needs Matplotlib."""

from __future__ import annotations

import base64
import importlib.util
import io
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpjax.inspection.parity import curves

if TYPE_CHECKING:
    from mpjax.inspection.parity.report import ParityReport

# Colour-blind safe (Okabe and Ito); the baseline is black.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")


def available() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def html(report: ParityReport) -> str:
    """The figure as an HTML element; an empty string without Matplotlib."""
    if not available():
        return ""
    with io.BytesIO() as file:
        draw(report).savefig(file, format="png", dpi=110)
        data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="loss curves and differences" style="max-width: 100%" src="data:image/png;base64,{data}">'


def draw(report: ParityReport) -> Any:
    """The figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    policies = [report.baseline, *dict.fromkeys(run.policy for run in report.runs if run.policy != report.baseline)]
    colours = {policy: _COLOURS[i % len(_COLOURS)] for i, policy in enumerate(policies)}
    panels = [_losses, _loss_differences, _metric_differences]
    panels += [_metrics] if any(len(run.metrics) > 1 for run in report.runs) else []
    panels += [_scales] if any(len(run.scales) > 1 for run in report.runs) else []
    # Not through pyplot: its global state and backend belong to the caller.
    figure = Figure(figsize=(4.6 * len(panels), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(report.title, fontsize=12)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        panel(axis, report, colours)
    return figure


def _band(axis: Any, band: curves.Band, colour: str, label: str) -> None:
    low, mean, high = (np.where(np.isfinite(values), values, np.nan) for values in band[1:])
    marker = "o" if len(band.steps) == 1 else ""
    axis.plot(band.steps, mean, color=colour, linewidth=1.6, label=label, marker=marker)
    axis.fill_between(band.steps, low, high, color=colour, alpha=0.18, linewidth=0)
    axis.set_xlabel("step")


def _losses(axis: Any, report: ParityReport, colours: dict[str, str]) -> None:
    for policy, colour in colours.items():
        _band(axis, curves.band(*curves.losses(report.runs_of(policy))), colour, policy)
    axis.set_ylabel("loss, mean with 95 % interval")
    axis.legend(frameon=False, fontsize=8)


def _loss_differences(axis: Any, report: ParityReport, colours: dict[str, str]) -> None:
    base = report.runs_of(report.baseline)
    axis.axhline(0, color=colours[report.baseline], linewidth=1)
    for policy, colour in [*colours.items()][1:]:
        _band(axis, curves.differences(report.runs_of(policy), base), colour, policy)
    axis.set_ylabel(f"loss − {report.baseline}'s, paired")


def _metric_differences(axis: Any, report: ParityReport, colours: dict[str, str]) -> None:
    factor = 100.0 if report.percent else 1.0
    policies = [*colours][1:]
    noise = report[policies[0]].noise * factor
    if math.isfinite(noise):
        axis.axhspan(-noise, noise, color="#000000", alpha=0.08, linewidth=0)
    axis.axhline(0, color="#000000", linewidth=1)
    for place, policy in enumerate(policies):
        found, colour = report[policy], colours[policy]
        values = [factor * x for x in found.differences]
        axis.plot([place] * len(values), values, ".", color=colour, alpha=0.5)
        if math.isfinite(found.interval.margin):
            low, mean, high = (factor * x for x in found.interval)
            axis.errorbar(place + 0.12, mean, [[mean - low], [high - mean]], fmt="o", color=colour, capsize=4)
    axis.set_xticks(range(len(policies)), policies, rotation=20, ha="right", fontsize=8)
    axis.set_xlim(-0.5, len(policies) - 0.5)
    unit = ", points" if report.percent else ""
    axis.set_ylabel(f"{report.metric_name} − {report.baseline}'s{unit}\n(grey: ± its sd over seeds)")


def _metrics(axis: Any, report: ParityReport, colours: dict[str, str]) -> None:
    factor = 100.0 if report.percent else 1.0
    for policy, colour in colours.items():
        rows = [run.metrics for run in report.runs_of(policy)]
        count = min(map(len, rows))
        values = factor * np.asarray([[value for _, value in row[:count]] for row in rows])
        _band(axis, curves.band(np.asarray([step for step, _ in rows[0][:count]]), values), colour, policy)
    axis.set_ylabel(report.metric_name + (", %" if report.percent else ""))


def _scales(axis: Any, report: ParityReport, colours: dict[str, str]) -> None:
    for policy, colour in colours.items():
        for run in report.runs_of(policy):
            if run.scales:
                steps, scales = zip(*run.scales, (len(run.losses), run.scales[-1][1]), strict=True)
                axis.plot(steps, scales, color=colour, linewidth=1, drawstyle="steps-post")
    axis.set_yscale("log", base=2)
    axis.set_xlabel("step")
    axis.set_ylabel("loss scale")
