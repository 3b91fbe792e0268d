"""Plain-text tables with aligned columns that fit a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence

GAP = "  "
_NARROWEST = 8


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """The lines of a table: the header, a rule, and the rows.

    Args:
        header: Column names.
        rows: Cells of each row, one for each column.
        right: Indices of the right-aligned columns.
        width: Maximum number of characters in a line. If it is exceeded, the widest left-aligned columns are
            narrowed. Their cells show only the end (a module's own name), and text in the last column is wrapped.

    Example:
        >>> print("\\n".join(table(("op", "runs"), [("dot_general", "12")], right={1})))
        op           runs
        ───────────  ────
        dot_general    12
    """
    widths = _widths([header, *rows], right, width)
    last = len(header) - 1
    lines = [_line(header, widths, right), GAP.join("─" * w for w in widths)]
    for row in rows:
        *cells, final = (cut(c, w) for c, w in zip(row, widths, strict=True))
        # Text is wrapped. The end of a path or number is the most informative part.
        wrapped = textwrap.wrap(row[last], widths[last]) if " " in row[last] and last not in right else [final]
        lines.append(_line([*cells, wrapped[0]], widths, right))
        lines += [_line([*("" for _ in cells), more], widths, right) for more in wrapped[1:]]
    return lines


def cut(cell: str, width: int) -> str:
    """Truncates a text to `width` characters: keeps its end, and marks the cut."""
    return cell if len(cell) <= width else "…" + cell[1 - width :]


def _line(cells: Sequence[str], widths: Sequence[int], right: Collection[int]) -> str:
    pairs = enumerate(zip(cells, widths, strict=True))
    return GAP.join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in pairs).rstrip()


def _widths(lines: Sequence[Sequence[str]], right: Collection[int], width: int | None) -> list[int]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    flexible = [i for i in range(len(widths)) if i not in right]
    while width is not None and flexible and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        widest = max(flexible, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return widths
