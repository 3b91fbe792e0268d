"""The report of `numerics`: ranges by module, parameter and operation, the histogram of gradients, the loss scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.inspection.ranges.range_statistics import EightBitRange, Limits, together_in_eight_bits
from mpjax.inspection.reports import Report, Section, folded_rows, merged, percent, scale_text, short_dtypes

_GAIN, _SHOWN = 1.05, 1e-4  # the least factor between two errors that differ, and their least difference
_MUCH = 0.05  # the share of flushed gradients from which the loss scale is the first thing to say


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of one module, parameter or operation in one pass, over all batches.

    Args:
        name: The module path, or the parameter's tree path.
        phase: `"forward"` or `"backward"`; backward values carry the loss scale.
        dtypes: The dtypes in which the program computes the values.
        max: The largest magnitude of a finite value.
        min_nonzero: The smallest nonzero magnitude; inf if there is none.
        count: The number of values.
        zeros: The share of zeros.
        flushed: The share of the nonzero values that half would flush to zero.
        overflowed: The share of the values that overflow to inf in half.
        nonfinite: The number of values that are inf or NaN already in float32.
        op: The primitive, in the table by operation.
        source: The source line of the operation, `file.py:12`.
    """

    name: str
    phase: str
    dtypes: tuple[str, ...]
    max: float
    min_nonzero: float
    count: int
    zeros: float
    flushed: float
    overflowed: float
    nonfinite: int
    op: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Tried:
    """A trial under autocast.

    Args:
        what: What was tried, in words.
        batch: The number of the batch, counted from 0.
        loss_scale: The loss scale.
        error: The relative error of the gradients against float32; inf if they are not finite.
        half_share: The share of the FLOPs of matmuls and convolutions in half.
    """

    what: str
    batch: int
    loss_scale: float
    error: float
    half_share: float


@dataclasses.dataclass(frozen=True)
class NumericsReport(Report):
    """Ranges of a training program's values; `print` it.

    All values come from a float32 run of the program, at the loss scale. The shares say what half does to them.

    Args:
        dtype: The half dtype that the values are compared to.
        loss_scale: The current loss scale.
        batches: The number of batches.
        activations: Forward ranges by module: operands and results of matmuls and convolutions, and module outputs.
        gradients: The same ranges in the backward pass, without gradients of parameters.
        parameters: Ranges of the gradients of parameters, by tree path, times the loss scale.
        by_op: Ranges of all arithmetic in both passes, by operation and source line, in program order.
        gradient_exponents: The number of values of `gradients` per exponent of two, at the loss scale; of those in half
            only, if there are any.
        largest_safe_scale: The largest power of two at which no gradient overflows. None if all gradients are
            zero, or if they are not finite in float32 either.
        init_scale: The recommended `init_scale` for `dynamic_loss_scale`: `largest_safe_scale / 4`, because gradients
            may grow later, within that transformation's limits; 1 for bfloat16, which has float32's range. Values in
            `keep_float32` and in outlier batches, whose steps dynamic loss scaling skips, do not count.
        keep_float32: Modules to keep in float32: in the trials this removes more error than the budget.
        overrides: Overrides for a `Policy` that keep these modules in float32.
        losing: Modules that may need float32, if nothing was tried: half overflows in their forward pass, or in their
            backward pass even without a loss scale, or flushes more than 5 % of their nonzero values in the forward
            pass, or in the backward pass at a scale that fits the others.
        losing_lines: The same of operations outside of named modules, as `exp at file.py:12`, if nothing was tried or
            the gradients are not finite in half.
        outliers: The batches whose gradients are far larger than those of the others, counted from 0.
        nonfinite: The batches whose gradients are inf or NaN in float32 too, counted from 0.
        float8: What one scale for each tensor does to the operands of float8 matmuls, by module; empty if the program
            has none.
        packed: What eight bits do to the arrays that the backward pass keeps in them, by the module that reads them;
            empty without `Rules(residuals="int8")` or `"float8"`.
        beyond: The arguments that a matmul reads and half does not hold, each with its largest magnitude.
        unseen: Operations that `numerics` could not look into (Pallas kernels, callbacks).
        trials: The errors of the gradients and the share in half without and with the recommendation, under autocast
            unless the program is in half already. Empty if nothing was tried.
        rules: About derivative rules that are not linear in their cotangent, whose gradients a loss scale makes wrong.
        notes: Further remarks.
        budget: The error of the gradients that is tolerated.
    """

    dtype: str
    loss_scale: float
    batches: int
    activations: tuple[Range, ...]
    gradients: tuple[Range, ...]
    parameters: tuple[Range, ...]
    by_op: tuple[Range, ...]
    gradient_exponents: Mapping[int, int]
    largest_safe_scale: float | None
    init_scale: float | None
    keep_float32: tuple[str, ...]
    losing: tuple[str, ...] = ()
    losing_lines: tuple[str, ...] = ()
    outliers: tuple[int, ...] = ()
    nonfinite: tuple[int, ...] = ()
    float8: tuple[EightBitRange, ...] = ()
    packed: tuple[EightBitRange, ...] = ()
    beyond: tuple[tuple[str, float], ...] = ()
    unseen: tuple[str, ...] = ()
    trials: tuple[Tried, ...] = ()
    rules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    budget: float = math.inf

    heading = "Numerics: what {0.dtype} would lose"
    main = "by_op"
    derived = "overrides"

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """Pairs for `Policy(overrides=...)`."""
        return tuple((f"*/{name}", "float32") for name in self.keep_float32)

    def flushed_at(self, scale: float) -> float:
        """The share of nonzero activation gradients that half would flush to zero at a loss scale.

        Gradients that the program keeps in float32, under an override for instance, do not count.

        Args:
            scale: The loss scale, a power of two. The exponents measured at the current scale are shifted to it.
        """
        return Limits.of(jnp.dtype(self.dtype)).flushed_share(self.gradient_exponents, scale / self.loss_scale)

    def _draw(self, axes: Any) -> None:
        """Draws the histogram of gradient exponents, with half's range."""
        (low, high), normal = Limits.of(jnp.dtype(self.dtype)).exponents, int(jnp.finfo(self.dtype).minexp)
        axes.axvspan(normal, high + 1, color="#dfeedd", label=f"{self.dtype} holds these")
        axes.axvspan(low, normal, color="#f3efd6", label=f"{self.dtype} holds these with fewer bits")
        counts = self.gradient_exponents
        shares = np.array([*counts.values()]) / max(sum(counts.values()), 1)
        axes.bar(np.array([*counts], float), shares, 1.0, align="edge", label="gradients of activations")
        axes.xaxis.set_major_formatter("2^{x:.0f}")
        axes.set(xlabel=f"size of the gradients, at loss scale {self.loss_scale:g}", ylabel="share of the nonzero ones")

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        ops = "op|line|pass|in|>max|>flushed|>overflowed|module"
        losing = [row for row in self.by_op if row.overflowed or row.flushed > 0.001]
        by_op = f"Of {len(self.by_op)} operations these would lose something if they ran in {self.dtype}."
        return [
            Section("", self._summary(), figure=self._draw),
            *([self._trials()] if self.trials else []),
            *map(self.by_module, ("activations", "gradients", "parameters")),
            *_in_eight_bits("Operands of float8 matmuls", self.float8, "under the one scale of their tensor"),
            *_in_eight_bits(
                "Kept for the backward pass in eight bits", self.packed, "beside the largest of their block"
            ),
            Section("By operation", by_op, ops, [*map(_op_cells, _by_loss(losing))]),
        ]

    def by_module(self, field: str) -> Section:
        """The section of `activations`, `gradients` or `parameters`."""
        names = {"activations": "Activations by module", "gradients": "Gradients of activations by module"}
        title = names.get(field, "Gradients of parameters")
        at_scale = "" if field == "activations" else f"At loss scale {scale_text(self.loss_scale)}."
        columns = "parameter" if field == "parameters" else "module"
        columns += "|in|>max|>min nonzero|>zeros|>flushed|>overflowed"
        rows = _by_loss(folded_rows(getattr(self, field), _together))
        return Section(title, at_scale, columns, [*map(_cells, rows)])

    def _summary(self) -> str:
        lines = [*self._verdict(), *self._scale_advice()]
        if self.keep_float32:
            pairs = ", ".join(f'("{pattern}", "{dtype}")' for pattern, dtype in self.overrides)
            lines.append(f"keep in float32: overrides=({pairs},)")
        lines += [f"not inspected: {place}" for place in self.unseen]
        lines += self.notes
        lines.append(
            f"Ranges of {self.batches} batch{'es' if self.batches != 1 else ''}, run in float32, against {self.dtype}; "
            f"loss scale {scale_text(self.loss_scale)}."
        )
        return "\n".join(lines)

    def _verdict(self) -> Iterator[str]:
        if self.init_scale is None and any(row.nonfinite for row in self.parameters):
            yield "The gradients are not finite in float32 either: mpjax.find_nonfinite shows where."
        elif self.nonfinite:
            yield (
                f"the gradients of batch {', '.join(map(str, self.nonfinite))} are not finite in float32 either, so "
                f"{self.dtype} is not the cause: mpjax.find_nonfinite with that batch shows where; the figures of the "
                "scale are those of the others"
            )
        yield from self.rules
        for name, size in self.beyond:
            yield f"{self.dtype} does not hold {name}, up to {size:.3g}, which a matmul reads: scale it down"
        if all(row.zeros == 1 for row in self.parameters):
            zeros = next((row for row in self.by_op if row.zeros == 1), None)
            yield "The gradients are all zero" + (f": {zeros.op} at {zeros.source} gives only zeros." if zeros else ".")
            return
        if self.keep_float32:
            yield f"{self.dtype} loses values that matter in {', '.join(self.keep_float32)}"
        if self.losing:
            yield f"{self.dtype} loses values in {', '.join(self.losing)} (not tried under autocast)"
        if self.losing_lines:
            yield f"{self.dtype} loses values outside of named modules: {'; '.join(self.losing_lines)}"
        if self.outliers:
            numbers = ", ".join(map(str, self.outliers))
            yield (
                f"outliers: the gradients of batch {numbers} are far larger than those of the others; the scale leaves "
                "them out, because dynamic loss scaling skips a step that overflows"
            )
        if self.beyond or self.keep_float32 or self.losing or self.losing_lines or self.init_scale is None:
            return
        tried = [row.error for row in self.trials[:2]]
        is_idle = len(tried) == 2 and _GAIN * tried[1] > tried[0] - _SHOWN  # the recommended scale, which was tried
        if self.trials and not math.isfinite(self.trials[-1].error):
            yield (
                f"the gradients are not finite in {self.dtype}, which no range here explains: mpjax.find_nonfinite of "
                "the gradient under autocast shows where"
            )
        elif self.unseen:
            count = f"{len(self.unseen)} operations were" if len(self.unseen) > 1 else "one operation was"
            yield f"found nothing that must stay in float32, but {count} not inspected"
        elif self.nonfinite or self.rules:
            return
        elif self.flushed_at(self.loss_scale) > _MUCH and not is_idle:
            yield (
                f"{self.dtype} flushes {self.flushed_at(self.loss_scale):.0%} of the activation gradients to zero at "
                f"loss scale {scale_text(self.loss_scale)}: use a loss scale, see below"
            )
        else:
            yield "no module needs to be kept in float32 for its range"
            if self.trials and self.trials[-1].error > self.budget:
                yield (
                    f"the error of the gradients in {self.dtype} is {percent(self.trials[-1].error)} by rounding, not "
                    "by range: mpjax.search tries which modules need float32"
                )

    def _trials(self) -> Section:
        rows = [
            (row.what, scale_text(row.loss_scale), percent(row.error), f"{row.half_share:.1%}") for row in self.trials
        ]
        text = f"on batch {self.trials[0].batch}" if self.trials and self.batches > 1 else ""
        columns = "tried in half|>loss scale|>error of the gradients|>FLOPs in half"
        return Section("", text, columns, rows)

    def _scale_advice(self) -> list[str]:
        if self.largest_safe_scale is None or self.init_scale is None:
            return []
        safe = scale_text(self.largest_safe_scale)
        if self.init_scale == 1 and self.dtype == "bfloat16":
            why = "(float32's range: none is needed)"
        elif self.init_scale == self.largest_safe_scale / 4:
            why = "(a quarter of that)"
        else:
            why = f"(the allowed scale nearest to a quarter of the largest safe one, {safe})"
        scales = dict.fromkeys((1.0, self.loss_scale, self.init_scale))
        shares = ", ".join(f"{self.flushed_at(s):.2%} at scale {scale_text(s)}" for s in scales)
        rest = " of all the others" if self.keep_float32 or self.outliers else ""
        word = "recommended" if self.trials or self.dtype == "bfloat16" else "not tried"
        if self.trials and not math.isfinite(self.trials[-1].error):
            word = "of no use alone"
        elif len(self.trials) > 1 and self.trials[1].error > _GAIN * self.trials[0].error:
            word = f"no better than {scale_text(self.loss_scale)}"
        return [
            f"largest safe loss scale{rest}: {safe}; {word}: "
            f"init_scale={scale_text(self.init_scale).replace('2^', '2.0**')} {why}",
            f"activation gradients flushed to zero: {shares}",
        ]


def _in_eight_bits(title: str, found: Sequence[EightBitRange], why: str) -> list[Section]:
    rows = sorted(folded_rows(found, together_in_eight_bits), key=lambda row: (-row.flushed, -row.outliers))
    cells = [
        (row.name or "-", row.phase, *row.dtypes, f"{row.max:.4g}", percent(row.flushed), f"{row.outliers:.3g}")
        for row in rows
    ]
    text = f"flushed: the nonzero values that become zero {why}"
    return [Section(title, text, "module|pass|dtype|>max|>flushed|>max / median", cells)] if found else []


def _by_loss(rows: Sequence[Range]) -> list[Range]:
    """The rows that overflow most come first, then those that flush most."""
    return sorted(rows, key=lambda row: (-row.overflowed, -row.flushed))


_together = functools.partial(
    merged, largest="max", least="min_nonzero", total="count nonfinite", shares="zeros flushed overflowed"
)


def _cells(row: Range) -> tuple[str, ...]:
    low = f"{row.min_nonzero:.3g}" if math.isfinite(row.min_nonzero) else "-"
    shares = (f"{row.zeros:.1%}", percent(row.flushed), percent(row.overflowed))
    return (row.name or "-", short_dtypes(row.dtypes), f"{row.max:.4g}", low, *shares)


def _op_cells(row: Range) -> tuple[str, ...]:
    shares = (percent(row.flushed), percent(row.overflowed))
    return (row.op, row.source, row.phase, short_dtypes(row.dtypes), f"{row.max:.4g}", *shares, row.name or "-")
