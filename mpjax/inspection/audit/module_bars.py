"""A bar chart of a program: the FLOPs of each module, coloured by dtype."""

from __future__ import annotations

from collections.abc import Iterable

from mpjax._tables import cut
from mpjax.inspection import svg
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
    parts = svg.legend(((_colour(dtype), dtype) for dtype in dtypes), _LABEL, 3, 130)
    for i, (module, flops) in enumerate(modules.items(), 1):
        y, x = i * _ROW, float(_LABEL)
        parts.append(svg.text(_LABEL - 8, y + 14, cut(module, _CHARACTERS), "end"))
        for dtype, number in flops.items():
            width = _BAR * number / largest
            title = f"{module}: {amount(number, 'FLOP')} in {dtype}"
            parts.append(svg.box(x, y + 3, width, _ROW - 5, _colour(dtype), title))
            x += width
        parts.append(svg.text(x + 6, y + 14, amount(sum(flops.values()), "FLOP")))
    height = _ROW * (len(modules) + 2) + 5
    parts.append(svg.text(_LABEL, height - 6, "0"))
    parts.append(svg.text(_LABEL + _BAR, height - 6, f"{amount(largest, 'FLOP')}, forward and backward", "end"))
    return svg.drawing(_LABEL + _BAR + 100, height, "FLOPs of each module by dtype", parts)


def _colour(dtype: str) -> str:
    return _COLOURS.get(dtype, "#8a8a8a")
