"""A cell of the table (a model under one configuration), and the file of all cells."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from testing.models.published import WORKLOADS, Workload

from .configurations import CONFIGURATIONS, PLANNED, Configuration
from .variants import VARIANTS, Variant


@dataclasses.dataclass(frozen=True)
class Cell:
    """One measurement; its text form is `MODEL CONFIGURATION` or `MODEL CONFIGURATION+VARIANT`."""

    model: str
    configuration: str
    variant: str = ""

    @classmethod
    def parse(cls, model: str, name: str) -> Cell:
        configuration, _, variant = name.partition("+")
        for kind, value, known in (
            ("model", model, tuple(WORKLOADS)),
            ("configuration", configuration, (*CONFIGURATIONS, *PLANNED)),
            ("variant", variant, ("", *VARIANTS)),
        ):
            if value not in known:
                raise ValueError(f"unknown {kind} {value!r}; choose from {', '.join(filter(None, known))}")
        return cls(model, configuration, variant)

    @property
    def name(self) -> str:
        """The cell's name among those of its model."""
        return f"{self.configuration}+{self.variant}" if self.variant else self.configuration

    def settings(self) -> Configuration:
        return (CONFIGURATIONS | PLANNED)[self.configuration]

    def options(self) -> Variant:
        return VARIANTS[self.variant] if self.variant else Variant("nothing", {})

    def workload(self, toy: bool, shallow: bool = False) -> Workload:
        """The model at the sizes of the cell."""
        workload = WORKLOADS[self.model]
        workload = workload.toy() if toy else workload.shallow() if shallow else workload
        return dataclasses.replace(workload, **self.options().changes(workload, self.settings()))

    def applies(self) -> bool:
        """Whether the cell exists."""
        return self.options().applies(WORKLOADS[self.model], self.settings())


class Results:
    """A JSON file of cells, written after each of them, so that the next run continues an interrupted one."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.content: dict[str, Any] = {"environment": {}, "matmul_peak": {}, "results": {}}
        if path.exists():
            self.content |= json.loads(path.read_text())

    def row(self, cell: Cell) -> dict[str, Any]:
        return self.content["results"].get(cell.model, {}).get(cell.name, {})

    def add(self, cell: Cell, row: dict[str, Any]) -> None:
        """Merges new results into a cell's row; a success replaces an earlier error, and an error a success."""
        rows = self.content["results"].setdefault(cell.model, {})
        old = rows.get(cell.name, {})
        keep_old = ("error" in old) == ("error" in row)
        rows[cell.name] = {**old, **row} if keep_old else row
        self.write()

    def replace(self, cell: Cell, row: dict[str, Any]) -> None:
        """Replaces the row of a cell; keeps those that another process has written since."""
        if self.path.exists():
            self.content["results"] = json.loads(self.path.read_text())["results"]
        self.content["results"].setdefault(cell.model, {})[cell.name] = row
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.content, indent=2) + "\n")
        temporary.replace(self.path)
