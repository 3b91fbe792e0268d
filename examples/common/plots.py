"""Plots training curves as PNG files, without a display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Colour-blind safe (Okabe and Ito).
_TRAIN, _TEST, _SCALE, _SKIP = "#0072B2", "#D55E00", "#009E73", "#CC79A7"


class Panel(NamedTuple):
    """A plot of one quantity: the label of its vertical axis, and the curves as legend to key in the metrics."""

    label: str
    curves: Mapping[str, str]
    percent: bool = False


def plot_curves(
    path: Path,
    metrics: Sequence[Mapping[str, Any]],
    title: str,
    panels: Sequence[Panel],
) -> None:
    """Draws one panel per quantity and one of the loss scale with the steps skipped in each epoch.

    Args:
        path: Path of the PNG file.
        metrics: One entry per epoch, with `epoch`, `loss_scale` and the total of `skipped_steps` so far.
        title: Title over all panels.
        panels: Panels from left to right, before that of the loss scale.
    """
    from matplotlib.ticker import PercentFormatter

    epochs = [line["epoch"] for line in metrics]
    figure, axes = new_figure(len(panels) + 1, title)
    for axis, panel in zip(axes, panels, strict=False):
        curves = {legend: key for legend, key in panel.curves.items() if not metrics or key in metrics[0]}
        for (legend, key), colour in zip(curves.items(), (_TRAIN, _TEST), strict=False):
            values = [line[key] for line in metrics]
            axis.plot(epochs, values, color=colour, label=legend, linewidth=1.8, marker=_marker(epochs))
        axis.set_ylabel(panel.label)
        if panel.percent:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.legend(frameon=False)
    _plot_loss_scale(axes[-1], metrics, epochs)
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, path)


def new_figure(panels: int, title: str) -> tuple[Any, Any]:
    """A figure with `panels` axes in a row, drawn without a display."""
    # Do not use pyplot: its global state and backend belong to the caller.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * panels, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG file atomically."""
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=130)
    os.replace(part, path)


def _plot_loss_scale(axis: Any, metrics: Sequence[Mapping[str, Any]], epochs: Sequence[int]) -> None:
    scales = [line["loss_scale"] for line in metrics]
    axis.plot(epochs, scales, color=_SCALE, linewidth=1.8, marker=_marker(epochs), drawstyle="steps-post")
    axis.set_yscale("log", base=2)
    # A constant scale would get an axis without ticks.
    axis.set_ylim(min(scales, default=1) / 4, max(scales, default=1) * 4)
    axis.set_ylabel("loss scale")
    totals = [line["skipped_steps"] for line in metrics]
    skipped = [(epoch, scale) for epoch, scale, gain in zip(epochs, scales, _gains(totals), strict=True) if gain]
    if skipped:
        axis.plot(*zip(*skipped, strict=True), "v", color=_SKIP, markersize=7, label="epoch with skipped steps")
        axis.legend(frameon=False)


def _gains(totals: Sequence[int]) -> list[int]:
    return [now - before for before, now in zip([0, *totals], totals, strict=False)]


def _marker(epochs: Sequence[int]) -> str:
    # A line through one or two points is hard to see.
    return "o" if len(epochs) < 3 else ""
