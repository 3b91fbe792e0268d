"""What a run looks like: its metrics by epoch, and which classes a model takes for which. Needs `mpjax[plot]`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import process_id

_NAMED = 40  # more classes than this have no room for their names


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the losses, the other metrics and the loss scale of the finished epochs."""
    if not (axes := _axes(path, ("loss", "metrics", "loss scale"))):
        return
    for name in dict.fromkeys(name for line in lines for name in line):
        last = name.split("_")[-1]
        if last not in _NO_METRICS:
            part = {"loss": "loss", "scale": "loss scale"}.get(last, "metrics")
            values = [line.get(name, np.nan) for line in lines]
            axes[part].plot([line["epoch"] for line in lines], values, ".-", label=name)
    axes["loss scale"].set_yscale("log", base=2)
    for ax in axes.values():
        ax.set_xlabel("epoch")
        ax.locator_params(axis="x", integer=True)
        if ax.lines:
            ax.legend()
    _save(axes, path)


_NO_METRICS = ("epoch", "step", "policy", "rate", "steps", "second", "finite", "nonfinite")  # by their last word


def draw_confusion(pairs: Sequence[tuple[str, str | None]], classes: Sequence[str], path: Path) -> None:
    """Draws how many images of each class (a row) a model takes for each class (a column)."""
    if not (axes := _axes(path, ("",))):
        return
    from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

    counts = confusion_matrix(*zip(*(pair for pair in pairs if pair[1] is not None), strict=True), labels=classes)
    # Shares of each class, so that a rare one is seen. A cell of small matrices also has its count.
    shares, few = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), len(classes) <= _NAMED
    shown = ConfusionMatrixDisplay(shares, display_labels=classes)
    shown.plot(ax=axes[""], cmap="Blues", include_values=few, xticks_rotation=90, im_kw={"vmin": 0, "vmax": 1})
    for count, text in zip(counts.ravel(), [] if shown.text_ is None else shown.text_.ravel(), strict=few):
        text.set_text(count or "")
    if not few:
        ticks = range(0, len(classes), len(classes) // 10)
        axes[""].set(xticks=ticks, yticks=ticks, xticklabels=ticks, yticklabels=ticks)
    shown.im_.colorbar.set_label("share of the images of the class")
    axes[""].set(xlabel="predicted class", ylabel="class")
    _save(axes, path)


def _axes(path: Path, titles: Sequence[str]) -> dict[str, Any]:
    """Axes side by side, by title; none in all processes but the first, and without matplotlib."""
    if process_id() or find_spec("matplotlib") is None:
        return {}
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4) if len(titles) > 1 else (8, 6), layout="constrained")
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    return dict(zip(titles, axes, strict=True))


def _save(axes: Mapping[str, Any], path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    next(iter(axes.values())).figure.savefig(part, format="png", dpi=120)
    part.replace(path)
