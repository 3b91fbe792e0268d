"""An SVG drawing of gradient exponents and module ranges against the range of a half dtype."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._tables import cut
from mpjax.inspection import svg
from mpjax.inspection.numerics.range_statistics import Limits

_COLOURS = ("#1f77b4", "#ff7f0e")
_FORWARD, _WINDOW, _SUBNORMAL = "#444444", "#dfeedd", "#f3efd6"
_LEFT, _WIDTH, _HEIGHT, _TOP, _ROW, _CHARACTERS = 230, 640, 220, 76, 15, 30


@dataclasses.dataclass(frozen=True)
class Span:
    """The range of exponents of a module's values."""

    name: str
    low: float
    high: float
    backward: bool


def chart(
    dtype: str, loss_scale: float, histograms: Mapping[str, Mapping[int, int]], spans: Sequence[Span] = ()
) -> str:
    """The drawing; an empty string if there is nothing to draw.

    Args:
        dtype: The half dtype.
        loss_scale: The loss scale of the gradients.
        histograms: For each kind of value, the number of values per exponent of two.
        spans: The ranges of modules.
    """
    histograms = {name: counts for name, counts in histograms.items() if counts}
    if not histograms and not spans:
        return ""
    low, high = Limits.of(jnp.dtype(dtype)).exponents
    seen = [e for counts in histograms.values() for e in counts]
    seen += [math.floor(e) for span in spans for e in (span.low, span.high)]
    first, last = max(min(*seen, low), low - 40) - 1, min(max(*seen, high), high + 40) + 2
    step = _WIDTH / (last - first)

    def x(exponent: float) -> float:
        return round(_LEFT + (min(max(exponent, first), last) - first) * step, 1)

    bottom = _TOP + (_HEIGHT if histograms else 0)
    end = bottom + (30 + _ROW * len(spans) if spans else 0)
    normal = int(jnp.finfo(dtype).minexp)
    parts = [
        svg.box(x(low), _TOP, x(normal) - x(low), end - _TOP, _SUBNORMAL),
        svg.box(x(normal), _TOP, x(high + 1) - x(normal), end - _TOP, _WINDOW),
        *_legend(dtype, [*histograms], spans),
    ]
    if histograms:
        parts += _bars(histograms, x, step, bottom)
    for i, span in enumerate(spans):
        y = bottom + 30 + _ROW * i
        parts.append(svg.text(_LEFT - 8, y + 9, cut(span.name, _CHARACTERS), "end"))
        colour = _COLOURS[0] if span.backward else _FORWARD
        parts.append(svg.box(x(span.low), y + 2, max(x(span.high) - x(span.low), 2), 7, colour, span.name))
    ticks = range(math.ceil(first / 8) * 8, last, 8)
    parts += [svg.text(x(e), end + 16, f"2^{e}", "middle") for e in ticks]
    parts.append(
        svg.text(_LEFT + _WIDTH / 2, end + 36, f"size of the values; gradients at loss scale {loss_scale:g}", "middle")
    )
    label = f"gradients and module ranges against the range of {dtype}"
    return svg.drawing(_LEFT + _WIDTH + 20, end + 46, label, parts)


def _bars(histograms: Mapping[str, Mapping[int, int]], x: Any, step: float, bottom: int) -> list[str]:
    """Bars side by side for each exponent, and the axis of their shares."""
    shares = {name: {e: n / sum(counts.values()) for e, n in counts.items()} for name, counts in histograms.items()}
    peak = max(share for counts in shares.values() for share in counts.values())
    tall, wide = _HEIGHT - 10, step / len(shares)
    parts = []
    for i, (name, counts) in enumerate(shares.items()):
        for e, share in counts.items():
            height = round(tall * share / peak, 1)
            title = f"{name}: {share:.1%} at 2^{e}"
            parts.append(svg.box(x(e) + i * wide, bottom - height, wide, height, _COLOURS[i], title))
    for part in (0, 0.5, 1):
        parts.append(svg.text(_LEFT - 8, bottom - part * tall + 4, f"{part * peak:.0%}", "end"))
    parts.append(svg.text(_LEFT - 8, bottom - tall / 4 + 4, "share of nonzero values", "end"))
    return parts


def _legend(dtype: str, names: Sequence[str], spans: Sequence[Span]) -> list[str]:
    entries = [(_WINDOW, f"{dtype} holds these"), (_SUBNORMAL, f"{dtype} holds these with fewer bits")]
    entries += list(zip(_COLOURS, names, strict=False))
    if spans:
        entries.append((_FORWARD, "range of a module, forward (backward in blue)"))
    return svg.legend(entries, _LEFT, 6, 330, 2)
