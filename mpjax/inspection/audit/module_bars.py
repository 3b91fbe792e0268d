"""A bar chart of a program: the FLOPs of each module, coloured by dtype."""

from __future__ import annotations

import html
from collections.abc import Iterable

from mpjax._tables import cut
from mpjax.inspection.audit.matmuls import Matmul
from mpjax.inspection.reports import amount, totals

_COLOURS = {"float16": "#2a9d5c", "bfloat16": "#1b7fa8", "float32": "#d9742b", "float64": "#b03a48"}
_ROW, _LABEL, _BAR, _CHARACTERS = 20, 360, 500, 46


def precision_map(matmuls: Iterable[Matmul]) -> str:
    """The chart as inline SVG, with the modules in program order and a legend of the dtypes."""
    modules: dict[str, dict[str, int]] = {}
    for (module, dtype), number in totals(
        ((row.module or row.source, row.dtype), row.flops) for row in matmuls
    ).items():
        modules.setdefault(module, {})[dtype] = number
    largest = max(sum(flops.values()) for flops in modules.values())
    dtypes = list(dict.fromkeys(dtype for flops in modules.values() for dtype in flops))
    parts = [_legend(dtypes)]
    for i, (module, flops) in enumerate(modules.items(), 1):
        y, x = i * _ROW, float(_LABEL)
        parts.append(
            f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">{html.escape(cut(module, _CHARACTERS))}</text>'
        )
        for dtype, number in flops.items():
            width = _BAR * number / largest
            title = f"<title>{html.escape(module)}: {amount(number, 'FLOP')} in {dtype}</title>"
            box = f'x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 5}"'
            parts.append(f'<rect {box} fill="{_colour(dtype)}">{title}</rect>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{amount(sum(flops.values()), "FLOP")}</text>')
    height = _ROW * (len(modules) + 2) + 5
    parts.append(
        f'<text x="{_LABEL}" y="{height - 6}">0</text><text x="{_LABEL + _BAR}" y="{height - 6}" '
        f'text-anchor="end">{amount(largest, "FLOP")}, forward and backward</text>'
    )
    label = 'role="img" aria-label="FLOPs of each module by dtype"'
    return f'<svg viewBox="0 0 {_LABEL + _BAR + 100} {height}" {label}>{"".join(parts)}</svg>'


def _legend(dtypes: list[str]) -> str:
    return "".join(
        f'<rect x="{_LABEL + 130 * i}" y="3" width="12" height="12" fill="{_colour(dtype)}"/>'
        f'<text x="{_LABEL + 130 * i + 18}" y="14">{dtype}</text>'
        for i, dtype in enumerate(dtypes)
    )


def _colour(dtype: str) -> str:
    return _COLOURS.get(dtype, "#8a8a8a")
