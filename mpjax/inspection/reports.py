"""The base class of reports: sections as text and as one HTML page, rows as CSV, everything as JSON."""

from __future__ import annotations

import abc
import base64
import csv
import dataclasses
import html
import importlib.util
import io
import json
import math
import operator
import os
import pathlib
import re
import string
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

WIDTH = 100
# The CSS class of each dtype, in long and in short form.
_DTYPES = dict.fromkeys(("float16", "bfloat16", "f16", "bf16"), "half") | dict.fromkeys(("float32", "f32"), "single")
_DTYPES |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "f8_e4m3fn", "f8_e5m2"), "eighth")
Key = TypeVar("Key")
Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class Section:
    """One part of a report: a heading, a paragraph, a table and, in HTML, a figure.

    Args:
        title: The heading; empty for none.
        text: Lines above the table.
        columns: The names of the table's columns, separated by `|`; those that begin with `>` are aligned to the right.
            Those that begin with `%` too; their cells are percentages, which the page draws as bars.
        rows: Its cells.
        figure: A function that draws into the axes of a Matplotlib figure, for the page.
        shown: Number of rows printed by default. The page folds the others; JSON has all rows.
    """

    title: str
    text: str = ""
    columns: str = ""
    rows: Sequence[Sequence[str]] = ()
    figure: Callable[[Any], None] | None = None
    shown: int = 20

    def lines(self, all: bool = False) -> list[str]:
        """The section as printed, in lines of at most `WIDTH` columns."""
        lines = [self.title] if self.title else []
        lines += [part for line in self.text.splitlines() for part in wrapped(line)]
        if self.rows:
            (header, right), shown = self._header(), self.rows if all else self.rows[: self.shown]
            lines += table(header, shown, right, WIDTH)
            if len(self.rows) > len(shown):
                lines.append(f"… and {len(self.rows) - len(shown)} more: print(report.text(all=True)), or --all")
        return lines

    def html(self) -> str:
        """The section as a fragment of the HTML page."""
        parts = [f"<h2>{html.escape(self.title)}</h2>"] if self.title else []
        parts += [f"<p>{html.escape(line)}</p>" for line in self.text.splitlines() if line]
        if self.figure and importlib.util.find_spec("matplotlib") is not None:
            with io.BytesIO() as file:
                drawn(self.figure).savefig(file, format="png", dpi=110)
                data = base64.b64encode(file.getvalue()).decode()
            parts.append(f'<img alt="figure of this section" src="data:image/png;base64,{data}">')
        if self.rows:
            parts.append(self._table(self.rows[: self.shown]))
            if more := self.rows[self.shown :]:
                parts.append(f"<details><summary>… and {len(more)} more</summary>{self._table(more)}</details>")
        return "\n".join(parts)

    def _table(self, rows: Sequence[Sequence[str]]) -> str:
        """Some of the rows as a table of the page, which scrolls by itself."""
        (header, right), bars = self._header(), self._bars()
        cells = "".join(_html_row(row, "td", right, bars) for row in rows)
        return f'<div class="table"><table>{_html_row(header, "th", right, {})}{cells}</table></div>'

    def _header(self) -> tuple[list[str], set[int]]:
        """The names of the columns, and the indices of those that are aligned to the right."""
        names = self.columns.split("|")
        return [name.lstrip(">%") for name in names], {i for i, name in enumerate(names) if name[:1] in (">", "%")}

    def _bars(self) -> dict[int, float]:
        """The columns that are drawn as bars, with the percentage that fills the cell."""
        names = enumerate(self.columns.split("|"))
        return {i: max(_percentage(row[i]) for row in self.rows) for i, name in names if name[:1] == "%"}


def drawn(figure: Callable[[Any], None]) -> Any:
    """A Matplotlib figure with the axes that a function draws into."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not through pyplot: its global state and backend belong to the caller.
    whole = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(whole)
    axes = whole.subplots()
    figure(axes)
    axes.legend(frameon=False)
    return whole


def _percentage(cell: str) -> float:
    """The number of a cell such as `12.5%`; 0 where it holds none."""
    return float(cell[:-1]) if cell.endswith("%") else 0.0


def _html_row(cells: Sequence[str], tag: str, right: Collection[int], bars: Mapping[int, float]) -> str:
    return f"<tr>{''.join(_html_cell(cell, tag, i in right, bars.get(i, 0)) for i, cell in enumerate(cells))}</tr>\n"


def _html_cell(cell: str, tag: str, right: bool, most: float = 0.0) -> str:
    """A cell, which has the class of its dtype if it names one or several of the same kind.

    Args:
        cell: Its text.
        tag: `td` or `th`.
        right: Whether it is aligned to the right.
        most: The percentage that fills the cell with a bar; 0 for a cell without a bar.
    """
    dtypes = {_DTYPES.get(name, "") for name in re.split("[,/]", cell)}
    classes = [*(["right"] if right else []), *(dtypes - {""} if len(dtypes) == 1 else ())]
    bar = f" style='--bar: {100 * _percentage(cell) / most:.0f}%'" if most else ""
    classes += ["bar"] if bar else []
    attributes = f" class='{' '.join(classes)}'{bar}" if classes else ""
    return f"<{tag}{attributes}>{html.escape(cell)}</{tag}>"


class Report(abc.ABC):
    """A result that prints as text and can be written as JSON, CSV or one HTML page without external resources.

    Subclasses are dataclasses. They define `sections` (the finding first), and declare the rest.

    Attributes:
        heading: The page's title, with the fields of the report as `{0.name}`.
        main: The field that holds the rows of the main table.
        derived: Properties that JSON has in addition to the fields, separated by spaces.
    """

    heading: ClassVar[str]
    main: ClassVar[str]
    derived: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__repr__ = Report.__repr__  # type: ignore[method-assign]  # in place of a dataclass's, of up to 400 kB

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    @property
    def headline(self) -> str:
        """The answer in one line: the first of the text that is not its title."""
        return next((line for section in self.sections() for line in section.text.splitlines() if line), self.title)

    @property
    def title(self) -> str:
        """The page's title."""
        return self.heading.format(self)

    @abc.abstractmethod
    def sections(self) -> list[Section]:
        """The report for readers: the parts of the text and of the page."""

    def to_dict(self) -> dict[str, Any]:
        """The report for programs: the dictionary that `to_json` writes."""
        return plain(self) | {name: plain(getattr(self, name)) for name in self.derived.split()}

    def table(self) -> list[dict[str, Any]]:
        """The rows of the report's main table, for CSV or a data frame."""
        return [
            {
                name: "/".join(map(str, value)) if isinstance(value, tuple) else value
                for name, value in plain(row).items()
            }
            for row in getattr(self, self.main)
        ]

    def failure(self) -> str:
        """The failure message, with which the command line exits with status 1; empty if there is none."""
        return ""

    def text(self, all: bool = False) -> str:
        """The report as printed: the finding first, then the tables.

        Args:
            all: Whether to print every row of the tables.
        """
        return "\n\n".join("\n".join(lines) for section in self.sections() if (lines := section.lines(all)))

    def __str__(self) -> str:
        return self.text()

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as JSON text, also written to `path` if one is given.

        JSON has no infinity and no NaN: these are the strings `"inf"`, `"-inf"` and `"nan"`, which `float` reads.
        """
        numbers = json.dumps(self.to_dict(), default=np.generic.item)
        known = json.loads(numbers, parse_constant=lambda name: str(float(name)))
        return written(f"{json.dumps(known, indent=2, ensure_ascii=False)}\n", path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The rows of `table` as CSV text, also written to `path` if one is given."""
        rows, file = self.table(), io.StringIO()
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return written(file.getvalue() if rows else "", path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as one self-contained HTML page, also written to `path` if one is given."""
        return written(_PAGE.substitute(title=html.escape(self.title), report=self._repr_html_()), path)

    def _repr_html_(self) -> str:
        """The report in a notebook: the page without its frame."""
        sections = (dataclasses.replace(s, title="") if s.title == self.title else s for s in self.sections())
        body = "\n".join(f"<section>{section.html()}</section>" for section in sections)
        return f'<style>{_STYLE}</style>\n<div class="mpjax"><h1>{html.escape(self.title)}</h1>\n{body}\n</div>'

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the report's first figure, if it has one; needs Matplotlib.

        Args:
            path: The file; its extension, such as `.png` or `.svg`, selects the format.
        """
        for figure in [section.figure for section in self.sections() if section.figure][:1]:
            drawn(figure).savefig(path, dpi=130)


def wrapped(line: str) -> list[str]:
    """Wraps a line of text to `WIDTH` columns. Continuation lines are indented by two more."""
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent + "  ", break_on_hyphens=False) or [""]


def folded(names: Iterable[str]) -> dict[str, str]:
    """Maps module paths that differ only in numbers to one name, such as `Block_[0-11]/Dense_0`.

    Example:
        >>> folded(["Net/Block_0/Dense_0", "Net/Block_1/Dense_0", "Net/Block_0/Dense_1", "Net/head"])["Net/head"]
        'Net/head'
        >>> set(folded(f"blocks/{i}/up" for i in range(12)).values())
        {'blocks/[0-11]/up'}
    """
    patterns = {name: re.sub(r"\d+", "#", name) for name in names}
    numbers = by_key((pattern, tuple(map(int, re.findall(r"\d+", name)))) for name, pattern in patterns.items())
    return {name: _named(pattern, numbers[pattern]) for name, pattern in patterns.items()}


def folded_rows(rows: Sequence[Any], together: Callable[[Sequence[Any]], Any]) -> list[Any]:
    """Merges the rows of repeated modules: those with equal folded names and dtypes.

    Args:
        rows: Dataclasses with the fields `name` and `dtypes`.
        together: Merges rows of the same name and dtypes into one, as `merged` does.
    """
    names = folded(row.name for row in rows)
    named = (dataclasses.replace(row, name=names[row.name]) for row in rows)
    return [*map(together, by_key(((row.name, row.dtypes), row) for row in named).values())]


def merged(rows: Sequence[Any], largest: str, least: str = "", total: str = "", shares: str = "") -> Any:
    """One row for several. The arguments are the names of its numbers; the shares are of the number `count`."""
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in dataclasses.fields(rows[0])}
    found = {
        name: of(columns[name]) for names, of in ((largest, max), (least, min), (total, sum)) for name in names.split()
    }
    for name in shares.split():
        found[name] = sum(map(operator.mul, columns["count"], columns[name])) / max(found["count"], 1)
    return dataclasses.replace(rows[0], **found)


def _named(pattern: str, numbers: Sequence[tuple[int, ...]]) -> str:
    first, *rest = pattern.split("#")
    for part, found in zip(rest, (sorted(set(column)) for column in zip(*numbers, strict=True)), strict=True):
        text = str(found[0])
        if len(found) > 1:
            together = found == list(range(found[0], found[-1] + 1))
            text = f"[{found[0]}-{found[-1]}]" if together else f"[{','.join(map(str, found))}]"
        first += text + part
    return first


def by_key(rows: Iterable[tuple[Key, Row]]) -> dict[Key, list[Row]]:
    """The rows of each key. Keys keep the order of their first occurrence.

    Example:
        >>> by_key([("float16", 4), ("float32", 1), ("float16", 2)])
        {'float16': [4, 2], 'float32': [1]}
    """
    found: dict[Key, list[Row]] = {}
    for key, row in rows:
        found.setdefault(key, []).append(row)
    return found


def totals(rows: Iterable[tuple[Key, Any]]) -> dict[Key, Any]:
    """Sums the numbers of each key. Keys keep the order of their first occurrence.

    Example:
        >>> totals([("float16", 4), ("float32", 1), ("float16", 2)])
        {'float16': 6, 'float32': 1}
    """
    return {key: sum(numbers) for key, numbers in by_key(rows).items()}


def added_up(rows: Iterable[tuple[Key, Sequence[Any]]]) -> dict[Key, tuple[Any, ...]]:
    """`totals` for several numbers per key.

    Example:
        >>> added_up([("Dense_0", (1, 40)), ("Dense_1", (1, 10)), ("Dense_0", (2, 80))])
        {'Dense_0': (3, 120), 'Dense_1': (1, 10)}
    """
    return {key: tuple(map(sum, zip(*alike, strict=True))) for key, alike in by_key(rows).items()}


def plain(value: Any) -> Any:
    """Converts dataclasses to dictionaries of their fields (without those hidden from `repr`), at any depth."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


def array_text(array: Any) -> str:
    """The dtype and shape of an array, as `float32[8,64]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def short_dtypes(dtypes: Iterable[str]) -> str:
    """Floating dtypes for a narrow column, as `f16/bf16`."""
    return "/".join(dtype.replace("bfloat", "bf").replace("float", "f") for dtype in dtypes)


def amount(number: float, unit: str) -> str:
    """Formats a number of FLOPs, bytes or seconds with three digits and an SI prefix.

    Example:
        >>> amount(4.09e9, "FLOP"), amount(13.345, "s"), amount(0.0123, "s"), amount(2.57e-8, "s"), amount(0, "B")
        ('4.09 GFLOP', '13.3 s', '12.3 ms', '25.7 ns', '0 B')
    """
    for prefix, size in _PREFIXES.items():
        if number >= 0.9995 * size:  # 0.9996 ms rounds to 1 ms with three digits.
            return f"{float(f'{number / size:.3g}'):g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "µ": 1e-6, "n": 1e-9}


def percent(share: float) -> str:
    """Formats a share as a percentage with two decimals, or with one significant digit below 0.01%.

    Example:
        >>> percent(0.1234), percent(0.0000997), percent(0.00005), percent(0.0), percent(math.inf)
        ('12.34%', '0.01%', '5e-03%', '0', 'not finite')
    """
    if not math.isfinite(share):
        return "not finite"
    return "0" if share == 0 else f"{share:.2%}" if share >= 0.000095 else f"{100 * share:.0e}%"


def duration(seconds: float) -> str:
    """Formats a time in seconds."""
    return amount(seconds, "s")


def scale_text(scale: float) -> str:
    """A loss scale as text; large ones as powers of two.

    Example:
        >>> scale_text(1.0), scale_text(2.0**15), scale_text(2.0**24)
        ('1', '32768', '2^24')
    """
    return f"{scale:g}" if scale < 2**20 else f"2^{round(math.log2(scale))}"


def written(text: str, path: str | os.PathLike[str] | None) -> str:
    """Writes the text to `path`, if one is given, and returns it."""
    if path is not None:
        pathlib.Path(path).write_text(text, "utf-8")
    return text


_PAGE = string.Template(
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title></head><body>
$report
</body></html>
"""
)
_STYLE = pathlib.Path(__file__).with_name("report.css").read_text("utf-8")


# Plain-text tables with aligned columns that fit a terminal.


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
