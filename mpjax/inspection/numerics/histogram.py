"""An SVG drawing of the exponents of gradients against the range of a half dtype."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp

from mpjax.inspection.numerics.range_statistics import Limits

_COLOURS = ("#1f77b4", "#ff7f0e")
_WINDOW, _SUBNORMAL = "#dfeedd", "#f3efd6"
_LEFT, _WIDTH, _TOP, _BOTTOM = 60, 810, 54, 274


def chart(dtype: str, loss_scale: float, histograms: Mapping[str, Mapping[int, int]]) -> str:
    """The drawing; an empty string if there is nothing to draw.

    Args:
        dtype: The half dtype.
        loss_scale: The loss scale of the gradients.
        histograms: For each kind of value, the number of values per exponent of two.
    """
    shares = {name: {e: n / sum(counts.values()) for e, n in counts.items()} for name, counts in histograms.items()}
    seen = [e for counts in shares.values() for e in counts]
    if not seen:
        return ""
    low, high = Limits.of(jnp.dtype(dtype)).exponents
    first, last = max(min(*seen, low), low - 40) - 1, min(max(*seen, high), high + 40) + 2
    step, normal = _WIDTH / (last - first), int(jnp.finfo(dtype).minexp)
    peak = max(share for counts in shares.values() for share in counts.values())

    def x(exponent: float) -> float:
        return _LEFT + (min(max(exponent, first), last) - first) * step

    parts = [
        _box(x(low), _TOP, x(normal) - x(low), _BOTTOM - _TOP, _SUBNORMAL),
        _box(x(normal), _TOP, x(high + 1) - x(normal), _BOTTOM - _TOP, _WINDOW),
    ]
    legend = [(_WINDOW, f"{dtype} holds these"), (_SUBNORMAL, f"{dtype} holds these with fewer bits")]
    for i, (colour, words) in enumerate([*legend, *zip(_COLOURS, shares, strict=True)]):
        left, top = _LEFT + 330 * (i % 2), 6 + 22 * (i // 2)
        parts += [_box(left, top, 12, 12, colour), _text(left + 18, top + 10, words)]
    for i, (name, counts) in enumerate(shares.items()):
        for e, share in counts.items():
            height = (_BOTTOM - _TOP - 10) * share / peak
            title = f"<title>{name}: {share:.1%} at 2^{e}</title>"
            parts.append(_box(x(e) + i * step / 2, _BOTTOM - height, step / 2, height, _COLOURS[i], title))
    parts += [_text(_LEFT - 8, _BOTTOM, "0", "end"), _text(_LEFT - 8, _TOP + 14, f"{peak:.0%}", "end")]
    parts += [_text(x(e), _BOTTOM + 16, f"2^{e}", "middle") for e in range(-(-first // 8) * 8, last, 8)]
    axis = f"share of nonzero gradients by size, at loss scale {loss_scale:g}"
    return _drawing(
        _LEFT + _WIDTH + 20, _BOTTOM + 46, [*parts, _text(_LEFT + _WIDTH / 2, _BOTTOM + 36, axis, "middle")]
    )


def _drawing(width: int, height: int, parts: Iterable[Any]) -> str:
    box = f'viewBox="0 0 {width} {height}" style="width:100%;max-width:{width}px"'
    return f'<svg {box} role="img" aria-label="gradients by size" font-family="sans-serif">{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">{title}</rect>'


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}">{html.escape(words)}</text>'
