"""The records of `watch`: statistics of each module in a step, and of the steps before an overflow."""

from __future__ import annotations

import dataclasses

import jax

from mpjax._tables import table
from mpjax.inspection.reports import WIDTH, percent

# The columns of a record's statistics.
COLUMNS = ("amax", "flushed", "zeros", "nonfinite")
_SHOWN = 20  # rows of a printed record
_MUCH = 0.5  # the share of flushed values from which a record warns


@dataclasses.dataclass(frozen=True)
class WatchedModule:
    """The statistics of one module in one pass of one step.

    Args:
        name: The module path; outside of named modules, the user's function.
        phase: `"forward"` or `"backward"`.
        amax: The largest magnitude of a finite value, computed in float32. Gradients do not include the loss scale.
        flushed: Of the nonzero values that the program stores in half, the share that is flushed to zero at the loss
            scale.
        zeros: The share of values that are zero in float32 too.
        nonfinite: The number of values that are inf or NaN, or beyond the range of the dtype that stores them.
    """

    name: str
    phase: str
    amax: float
    flushed: float
    zeros: float
    nonfinite: int


@dataclasses.dataclass(frozen=True)
class WatchRecord:
    """The statistics of one step; `print` it.

    Args:
        step: The step number, counted from 0.
        loss_scale: The loss scale of the step's gradients.
        overflow: Whether the gradients were not finite.
        modules: The statistics by module, in program order.
        history: For a step with an overflow, the records before it, oldest first.
        unseen: Operations of which only the results count, and why.
    """

    step: int
    loss_scale: float
    overflow: bool
    modules: tuple[WatchedModule, ...]
    history: tuple[WatchRecord, ...] = ()
    unseen: tuple[str, ...] = ()

    def scalars(self) -> dict[str, float]:
        """The statistics by tag, such as `backward/Net/Dense_0/amax`, for TensorBoard and similar tools."""
        numbers = {
            f"{row.phase}/{row.name or '-'}/{name}": float(getattr(row, name))
            for row in self.modules
            for name in COLUMNS
        }
        return {"loss_scale": self.loss_scale, **numbers}

    def __str__(self) -> str:
        lines = [f"step {self.step}, loss scale {self.loss_scale:g}" + (": overflow" if self.overflow else "")]
        bad = [row for row in self.modules if row.nonfinite]
        if bad:
            first = bad[0]
            lines.append(f"first inf or NaN: {first.name or '-'}, {first.phase} ({first.nonfinite} values)")
        elif self.overflow:
            lines.append("no watched value leaves its range: mpjax.find_nonfinite finds the operation")
        lost = [row for row in self.modules if row.flushed > _MUCH]
        if lost:
            several = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            what = f"{lost[0].name or '-'}, {lost[0].phase} ({lost[0].flushed:.0%}){several}"
            lines.append(f"warning: flushed to zero are most values of {what}: gradients need a larger loss scale")
        if self.history:
            before = [
                max((row.amax for row in record.modules if bad and _place(row) == _place(bad[0])), default=0.0)
                for record in self.history
            ]
            steps = ", ".join(
                f"{amax:.3g} at step {record.step}" for record, amax in zip(self.history, before, strict=True)
            )
            lines.append(f"its largest value before: {steps}")
        worst = sorted(self.modules, key=lambda row: (-row.nonfinite, -row.flushed, -row.amax))
        rows = [
            (
                row.name or "-",
                row.phase,
                f"{row.amax:.4g}",
                percent(row.flushed),
                f"{row.zeros:.1%}",
                str(row.nonfinite),
            )
            for row in worst[:_SHOWN]
        ]
        header = ("module", "pass", "amax", "flushed", "zeros", "inf/NaN")
        lines += table(header, rows, {2, 3, 4, 5}, WIDTH)
        return "\n".join([*lines, *(f"not inspected: {place}" for place in self.unseen)])


def _place(row: WatchedModule) -> tuple[str, str]:
    return row.name, row.phase


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchState:
    """State of `watch`: arrays of fixed shapes and dtypes, passed from step to step like the optimizer state.

    Args:
        step: Shape (), int32; the number of steps taken.
        last_finite: Shape (), bool; whether the last step's gradients were finite.
        written: Shape (), int32; the number of records written.
        steps: Shape (keep,), int32; the steps of the last records, in a ring buffer.
        scales: Shape (keep,), float32; their loss scales.
        overflows: Shape (keep,), bool; whether their gradients were not finite.
        statistics: Shape (keep, modules, 4), float32; the columns are `COLUMNS`.
        names: Name and pass of each module; static, not an array.
        unseen: Operations of which only the results count; static.
    """

    step: jax.Array
    last_finite: jax.Array
    written: jax.Array
    steps: jax.Array
    scales: jax.Array
    overflows: jax.Array
    statistics: jax.Array
    names: tuple[tuple[str, str], ...] = dataclasses.field(metadata={"static": True})
    unseen: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())

    def records(self) -> tuple[WatchRecord, ...]:
        """Returns the last records, oldest first. The record of an overflow has the earlier ones as its history.

        Call it on the host, outside of `jit`.
        """
        state = jax.device_get(self)
        keep, written = len(state.steps), int(state.written)
        records: list[WatchRecord] = []
        for i in range(max(written - keep, 0), written):
            at = i % keep
            modules = tuple(
                WatchedModule(*place, float(amax), float(underflow), float(zeros), int(nonfinite))
                for place, (amax, underflow, zeros, nonfinite) in zip(self.names, state.statistics[at], strict=True)
            )
            overflow = bool(state.overflows[at])
            history = tuple(dataclasses.replace(record, history=()) for record in records) if overflow else ()
            records.append(
                WatchRecord(int(state.steps[at]), float(state.scales[at]), overflow, modules, history, self.unseen)
            )
        return tuple(records)
