"""The main results of the benchmarks in a few rows: `python -m benchmarks.headlines`.

The README and the results page begin with them.
"""

from __future__ import annotations

import json
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import RESULTS
from benchmarks.training.tables import memory, speedup

Results = dict[str, Any]
# The libraries that a row compares mpjax with, if they have a result.
PEERS = ("hand-written", "Flax", "Flax DynamicScale", "jmp", "mixed-precision-for-JAX")
MODELS = ("resnet50", "bert_base_128", "gpt2_medium")


class Headline(NamedTuple):
    """One result: the quantity, mpjax's value, the others' values, and the section with the whole table."""

    what: str
    mpjax: str
    others: str
    title: str  # the title of a section of the results page

    def row(self, link: str = "") -> str:
        """The row of a Markdown table."""
        anchor = re.sub(r"[^a-z0-9 ]", "", self.title.lower()).replace(" ", "-")
        return f"| {self.what} | {self.mpjax} | {self.others} | [{self.title}]({link}#{anchor}) |"


def headlines(folder: pathlib.Path) -> list[Headline]:
    """The rows for which a folder has results; no planned ones where a GPU was measured."""
    found: list[Headline] = []
    measured = (folder / "training_gpu.json").exists()
    for name, headline in _HEADLINES.items():
        path = folder / f"{name}.json"
        if path.exists() and not (measured and headline is _planned):
            found += headline(json.loads(path.read_text())["results"])
    return found


def table(rows: list[Headline], link: str = "") -> str:
    """The rows as Markdown; `link` is the page that contains their source sections."""
    return "\n".join(["| what | mpjax | others | source |", "|---|---|---|---|", *(row.row(link) for row in rows)])


def _training(results: Results) -> Iterator[Headline]:
    def speeds(cell: str, full: str) -> str:
        found = {model: speedup(results.get(model, {}), cell, full) for model in MODELS}
        return ", ".join(f"{model} {found[model]:.2f}×" for model in MODELS if found[model])

    fused = "autocast_bfloat16_fused", "flax_bfloat16+cudnn_attention"
    for what, full, ours, by_hand in (
        ("float16 training step over float32", "float32", "autocast_float16", "flax_float16"),
        ("bfloat16 training step over TF32", "tf32", "autocast_bfloat16", "flax_bfloat16"),
        ("bfloat16 step over TF32, fused attention", "tf32", *fused),
    ):
        if speeds(ours, full):
            known = f"hand-written {speeds(by_hand, full) or '-'}"
            yield Headline(f"Speed of a {what}", speeds(ours, full), known, "Training steps on a GPU")


def _faults(results: Results) -> Iterator[Headline]:
    counts = {
        library: sum(cells.get(library) == "has it" for cells in results.values())
        for library in ("mpjax", "Flax", "jmp", "mixed-precision-for-JAX", "Keras 3")
    }
    yield Headline(
        f"Known faults of mixed precision libraries (of {len(results)})",
        str(counts.pop("mpjax")),
        ", ".join(f"{library} {count}" for library, count in counts.items()),
        "Known faults, library by library",
    )


def _counted(key: str, holds: Callable[[float], bool]) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: f"{sum(holds(row[key]) for row in rows)} of {len(rows)}"


def _median(key: str) -> Callable[[list[dict[str, Any]]], str]:
    return lambda rows: f"{statistics.median(row[key] for row in rows if key in row):.2f}"


def _casting(results: Results) -> Iterator[Headline]:
    of_tools: dict[str, list[dict[str, Any]]] = {}
    for rows in results.values():
        for tool, row in rows.items():
            of_tools.setdefault(tool, []).append(row)

    def compared(value: Callable[[list[dict[str, Any]]], str]) -> tuple[str, str]:
        ran = {tool: [row for row in rows if "half_share" in row] for tool, rows in of_tools.items()}
        others = ", ".join(f"{tool} {value(ran[tool])}" for tool in PEERS if len(ran.get(tool, [])) > 1)
        ours = ", ".join(f"{way} {value(ran[f'mpjax.{way}'])}" for way in ("autocast", "with_policy"))
        return ours, others

    programs = f"{len(results)} float32 programs, float16"
    for what, value in {
        "Programs with all matmul FLOPs in half": _counted("half_share", lambda share: share == 1),
        "Programs with a risky operation in half": _counted("risky", lambda count: count > 0),
        "Residual bytes relative to float32, median": _median("residuals"),
    }.items():
        yield Headline(f"{what} ({programs})", *compared(value), "Casting")


def _planned(results: Results) -> Iterator[Headline]:
    def shares(way: str) -> str:
        found = {
            model: memory(rows.get(f"{way}_bfloat16", {}), rows.get("float32", {})) for model, rows in results.items()
        }
        return ", ".join(f"{model} {found[model]:.2f}" for model in MODELS if found.get(model))

    if shares("autocast"):
        yield Headline(
            "Memory of a bfloat16 training step relative to float32 (XLA's plan for an H200, not a measurement)",
            shares("autocast"),
            f"hand-written {shares('flax')}",
            "Training steps compiled for an H200 without a GPU",
        )


_HEADLINES: dict[str, Callable[[Results], Iterator[Headline]]] = {
    "training_gpu": _training,
    "casting_float16_cpu": _casting,
    "faults_cpu": _faults,
    "training_dry_run": _planned,
}


if __name__ == "__main__":
    print(table(headlines(RESULTS), link="benchmarks/results/README.md"))
