"""Plots of ranges: with matplotlib as image files, and as a small inline SVG for the HTML page."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from mpjax.inspection.numerics.range_statistics import Limits

if TYPE_CHECKING:
    from mpjax.inspection.numerics.report import NumericsReport

_ACTIVATIONS, _PARAMETERS, _WINDOW, _SUBNORMAL = "#1f77b4", "#ff7f0e", "#dfeedd", "#f3efd6"
_MOST_MODULES = 40


def plot(report: NumericsReport, path: str | os.PathLike[str]) -> None:
    """Writes the histogram of gradient exponents and the ranges by module to an image file."""
    figure = _figure()(figsize=(9, 4 + 0.22 * min(len(report.activations) + len(report.gradients), 2 * _MOST_MODULES)))
    upper, lower = figure.subplots(2, 1, height_ratios=[1, 1.2], squeeze=True)
    _draw_histogram(upper, report)
    _draw_ranges(lower, report)
    figure.tight_layout()
    figure.savefig(path)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "NumericsReport.plot draws with matplotlib, which is not installed: pip install 'mpjax[plot]'. "
            "(to_html has the histogram without it.)"
        ) from error
    return Figure


def _window(report: NumericsReport) -> tuple[int, int]:
    return Limits.of(jnp.dtype(report.dtype)).exponents


def _smallest_normal(report: NumericsReport) -> int:
    return int(jnp.finfo(report.dtype).minexp)


def _draw_window(axes: Any, report: NumericsReport) -> None:
    (low, high), normal = _window(report), _smallest_normal(report)
    axes.axvspan(low - 0.5, normal - 0.5, color=_SUBNORMAL, label=f"{report.dtype} holds these with fewer bits")
    axes.axvspan(normal - 0.5, high + 0.5, color=_WINDOW, label=f"{report.dtype} holds these")


def _draw_histogram(axes: Any, report: NumericsReport) -> None:
    _draw_window(axes, report)
    for label, counts, color in _histograms(report):
        total = sum(counts.values()) or 1
        axes.bar(
            counts.keys(), [100 * n / total for n in counts.values()], width=0.9, alpha=0.7, color=color, label=label
        )
    axes.set_xlabel(f"exponent of two of the gradient's size, at loss scale {report.loss_scale:g}")
    axes.set_ylabel("% of nonzero values")
    axes.legend(fontsize="small")


def _draw_ranges(axes: Any, report: NumericsReport) -> None:
    _draw_window(axes, report)
    rows = [*report.activations[:_MOST_MODULES], *report.gradients[:_MOST_MODULES]]
    rows = [row for row in rows if row.max > 0]
    for y, row in enumerate(reversed(rows)):
        color = _ACTIVATIONS if row.phase == "backward" else "#444444"
        axes.plot([math.log2(row.min_nonzero), math.log2(row.max)], [y, y], color=color, marker="|", linewidth=3)
    labels = [f"{row.name or '-'}{' (gradient)' if row.phase == 'backward' else ''}" for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), labels, fontsize="x-small")
    axes.set_xlabel("exponents of two between the smallest nonzero and the largest value, by module")


def _histograms(report: NumericsReport) -> list[tuple[str, Any, str]]:
    return [
        ("gradients of activations", report.activation_gradient_exponents, _ACTIVATIONS),
        ("gradients of parameters", report.parameter_gradient_exponents, _PARAMETERS),
    ]


def svg(report: NumericsReport) -> str:
    """The histogram with half's window as an inline SVG; empty if there is no gradient."""
    histograms = [(label, counts, color) for label, counts, color in _histograms(report) if counts]
    if not histograms:
        return ""
    (low, high), normal = _window(report), _smallest_normal(report)
    seen = [e for _, counts, _ in histograms for e in counts]
    first, last = max(min(*seen, low), low - 40) - 2, min(max(*seen, high), high + 40) + 2
    width, height, step = 900, 260, 900 / (last - first + 1)
    peak = max(n / sum(counts.values()) for _, counts, _ in histograms for n in counts.values())

    def x(exponent: float) -> float:
        return round((exponent - first) * step, 1)

    parts = [
        f'<rect x="{x(low)}" y="0" width="{x(high + 1) - x(low):.1f}" height="{height}" fill="{_SUBNORMAL}"/>',
        f'<rect x="{x(normal)}" y="0" width="{x(high + 1) - x(normal):.1f}" height="{height}" fill="{_WINDOW}"/>',
        f'<text x="{x(low) + 4}" y="14">{report.dtype} at loss scale {report.loss_scale:g}</text>',
    ]
    for i, (label, counts, color) in enumerate(histograms):
        total = sum(counts.values())
        for exponent, n in counts.items():
            if first <= exponent <= last:
                bar = round((height - 40) * n / total / peak, 1)
                left = x(exponent) + i * step / 2
                parts.append(
                    f'<rect x="{left:.1f}" y="{height - bar}" width="{step / 2:.1f}" height="{bar}" fill="{color}"/>'
                )
        parts.append(f'<text x="8" y="{14 + 16 * i}" fill="{color}">{label}</text>')
    parts += [
        f'<text x="{x(e)}" y="{height + 16}">2^{e}</text>' for e in range(first - first % 8, last, 8) if e >= first
    ]
    return f'<svg viewBox="0 0 {width} {height + 20}" width="{width}" role="img">{"".join(parts)}</svg>'
