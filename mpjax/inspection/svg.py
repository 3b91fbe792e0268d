"""The elements of inline SVG drawings: boxes with tooltips, texts, a legend."""

from __future__ import annotations

import html
from collections.abc import Iterable


def drawing(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """A drawing of a size, made of boxes and texts."""
    box = f'viewBox="0 0 {width:g} {height:g}" style="width:100%;max-width:{width:g}px"'
    about = f'role="img" aria-label="{html.escape(label)}" font-family="sans-serif"'
    return f"<svg {box} {about}>{''.join(parts)}</svg>"


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    """A filled rectangle with a tooltip."""
    inside = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">{inside}</rect>'


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """A text; `anchor` is the part of it at x: "start", "middle" or "end"."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="#222">{html.escape(words)}</text>'
    )


def legend(entries: Iterable[tuple[str, str]], x: float, y: float, step: float, columns: int = 9) -> list[str]:
    """The colours with their meanings, in rows of `columns` entries that are `step` wide."""
    parts = []
    for i, (colour, words) in enumerate(entries):
        left, top = x + step * (i % columns), y + 22 * (i // columns)
        parts += [box(left, top, 12, 12, colour), text(left + 18, top + 10, words)]
    return parts
