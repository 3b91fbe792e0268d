"""The report of `plan`: whether a step fits, what it holds in memory, and what each change would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mpjax.casting import Rules
from mpjax.inspection.auditing.matmuls import Matmul
from mpjax.inspection.reports import Report, Section, amount, duration, percent, totals
from mpjax.planning.memory import Memory

_GIVEN = "as it is"
# The fields of `Tried` that may be None in all rows, each with its column and its text.
_IF_KNOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("seconds", "least time", duration),
    ("modelled", "modelled", duration),
    ("error", "error", percent),
    ("batch", "largest batch", str),
)


@dataclasses.dataclass(frozen=True)
class Tried:
    """A step with one change, or with those that were chosen, as it was compiled.

    Args:
        name: The changes as they are written.
        peak: Bytes at the peak on each device.
        bytes_moved: The bytes that its kernels read and write.
        seconds: The least time of its kernels, at the device's peak rates of bytes and FLOPs; None if unknown.
        modelled: Their time by the model of `mpjax.planning.kernel_time`; None where it can't be told.
        same: Whether it is the same program as without the change.
        error: The relative error of gradients or results against float32 on the given values; None if none were given.
        batch: The largest batch that fits; None if it was not sought.
    """

    name: str
    peak: int
    bytes_moved: int
    seconds: float | None
    modelled: float | None = None
    same: bool = False
    error: float | None = None
    batch: int | None = None


@dataclasses.dataclass(frozen=True)
class PlanReport(Report):
    """Whether a step fits a device, and what to change. `print` it, or read its fields.

    Args:
        name: The step's name.
        device: The device that it was compiled for.
        budget: The memory that it may take on each device, in bytes; None if it is not known.
        memory: What it holds at its peak, as it is given.
        options: The step as it is given, and with each change.
        chosen: The names of the changes with which it fits at least cost, or takes least; empty if it needs none.
        after: Its memory with them; None if there are none.
        fits: Whether it fits with them; None without a budget.
        rules: The options of `Rules` among them, for `autocast` or `with_policy`; None if there are none.
        edits: A sentence for each of the others.
        matmuls: Its matmuls and convolutions, as `audit` has them.
        compiled: How many programs were compiled.
        batch: The size of its batch; None if no batch was sought.
        notes: The limits of the figures.
    """

    name: str
    device: str
    budget: int | None
    memory: Memory
    options: tuple[Tried, ...]
    chosen: tuple[str, ...]
    after: Memory | None
    fits: bool | None
    rules: Rules | None
    edits: tuple[str, ...]
    matmuls: tuple[Matmul, ...] = dataclasses.field(repr=False)
    compiled: int = 0
    batch: int | None = None
    notes: tuple[str, ...] = ()

    main = "options"
    derived = "peak flops kinds"

    @property
    def title(self) -> str:
        """The page's title."""
        return f"Plan of {self.name}"

    @property
    def peak(self) -> int:
        """XLA's plan of the step's memory as it is given, in bytes on each device."""
        return self.memory.peak

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes at the peak by kind; they add up to `peak`."""
        return self.memory.kinds

    @property
    def flops(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the dtype of their operands."""
        return totals((row.dtype, row.flops) for row in self.matmuls)

    def failure(self) -> str:
        """What is missing if no changes make the step fit; else empty."""
        return self._answer() if self.fits is False else ""

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        first = self.options[0]
        text = [self._answer(), *self._remedy()]
        work = [f"{amount(sum(self.flops.values()), 'FLOP')} of matmuls", f"{amount(first.bytes_moved, 'B')} moved"]
        work += [] if first.seconds is None else [f"{duration(first.seconds)} at least, at the device's peak rates"]
        work += [] if first.modelled is None else [f"{duration(first.modelled)} modelled"]
        sections = [Section(self.title, "\n".join([*text, ", ".join(work)])), self._kinds(), self._held()]
        sections += [self._options()]
        return sections + ([Section("Notes", "\n".join(self.notes))] if self.notes else [])

    def _answer(self) -> str:
        needs, last = amount(self.peak, "B"), amount((self.after or self.memory).peak, "B")
        with_changes = f"{last} with {_joined(self.chosen)}" if self.chosen else ""
        if self.budget is None:
            return f"{needs} on {self.device}" + (f"; {with_changes}" if with_changes else "")
        budget = f"{amount(self.budget, 'B')} of {self.device}"
        if self.peak <= self.budget:
            return f"fits: {needs} of the {budget}"
        if self.fits:
            return f"does not fit as it is: {needs}, of the {budget}; it fits, {with_changes}"
        missing = amount((self.after or self.memory).peak - self.budget, "B")
        least = f"; the least found is {with_changes}" if with_changes else ""
        return f"does not fit: {needs}, of the {budget}{least}; {missing} too much"

    def _remedy(self) -> list[str]:
        lines = [f"rules=mpjax.Rules({rules_text(self.rules)})"] if self.rules is not None and self.chosen else []
        lines = [] if any("Rules(" in edit for edit in self.edits) else lines
        largest = next((row.batch for row in self.options if row.batch is not None), None)
        found = [] if largest is None else [f"largest batch as it is: {largest} (now {self.batch})"]
        return [*lines, *self.edits, *found]

    def _kinds(self) -> Section:
        before, after = self.memory.kinds, self.after.kinds if self.after else {}
        names = list(dict.fromkeys([*before, *after]))
        rows = [(n, _bytes(before.get(n, 0)), *([_bytes(after.get(n, 0))] if self.after else [])) for n in names]
        columns = f"kind|>{_GIVEN}" + ("|>with the changes" if self.after else "")
        return Section("Memory at the peak", "", columns, rows, figure=self._draw)

    def _held(self) -> Section:
        rows = [
            (row.kind, row.module or "-", row.source or "-", row.dtype or "-", _bytes(row.bytes), str(row.count))
            for row in self.memory.held
            if row.bytes > 0
        ]
        return Section("Largest, as it is", "", "kind|module|line|dtype|>bytes|>arrays", rows, shown=10)

    def _options(self) -> Section:
        first = self.options[0]
        given = [each for each in _IF_KNOWN if any(getattr(row, each[0]) is not None for row in self.options)]
        rows = [
            (
                row.name,
                amount(row.peak, "B"),
                f"{row.peak / first.peak - 1:+.0%}",
                f"{row.bytes_moved / max(first.bytes_moved, 1):.2f}×",
                *("-" if (x := getattr(row, field)) is None else text(x) for field, _, text in given),
            )
            for row in self.options
            if not row.same
        ]
        columns = "|>".join(["option", "peak", "change", "bytes moved", *(title for _, title, _ in given)])
        idle = [row.name for row in self.options if row.same]
        text = f"each compiled; {self.compiled} programs" + (f"\nno effect: {', '.join(idle)}" if idle else "")
        return Section("Options", text, columns, rows)

    def _draw(self, axes: Any) -> None:
        """Memory over the step by kind, as it is and with the changes."""
        plans = [(_GIVEN, self.memory.timeline)]
        plans += [("with the changes", self.after.timeline)] if self.after else []
        held = (kind for _, line in plans for point in line for kind in point)
        kinds = list(dict.fromkeys([*self.memory.kinds, *held]))
        for i, (name, line) in enumerate(plans):
            xs = [i * 1.1 + n / max(len(line) - 1, 1) for n in range(len(line))]
            stacks = [[point.get(kind, 0) / 1e9 for point in line] for kind in kinds]
            colors = [f"C{n % 10}" for n in range(len(kinds))]
            axes.stackplot(xs, stacks, labels=kinds if i == 0 else (), colors=colors)
            axes.text(i * 1.1 + 0.5, 0, name, ha="center", va="bottom")
        if self.budget is not None and self.budget < 3 * self.peak:
            axes.axhline(self.budget / 1e9, color="black", linestyle="--", label="budget")
        axes.set(xlabel="instructions in order; the body of a loop once", ylabel="GB", xticks=[])


def rules_text(rules: Rules) -> str:
    """The options of rules that differ from the default, as they are written."""
    default = Rules()
    fields = [field.name for field in dataclasses.fields(Rules)]
    changed = [name for name in fields if getattr(rules, name) != getattr(default, name)]
    return ", ".join(f'{name}="{getattr(rules, name)}"' for name in changed)


def _joined(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _bytes(size: int) -> str:
    return ("-" if size < 0 else "") + amount(abs(size), "B") if size else "-"
