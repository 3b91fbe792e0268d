"""What `numerics` found: ranges by module, parameter and operation, the histogram of gradients, the loss scale."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax.inspection.numerics import histogram
from mpjax.inspection.numerics.range_statistics import Limits
from mpjax.inspection.reports import Report, Section, folded_rows, percent, short_dtypes, written


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of one module, parameter or operation in one pass, over all batches.

    Args:
        name: module path, or the parameter's tree path.
        phase: `"forward"` or `"backward"`; backward values carry the loss scale.
        dtypes: the dtypes that the program computes them in.
        max: the largest size of a finite value.
        min_nonzero: the smallest size of a nonzero one; inf if there is none.
        count: how many values.
        zeros: the share of zeros.
        flushed: the share of the nonzero values that half would flush to zero.
        overflowed: the share of the values that half would make inf.
        nonfinite: how many are inf or NaN in float32 already.
        op: the primitive, in the table by operation.
        source: its line, `file.py:12`.
        rule: what autocast's default lists say of it: `"half"`, `"float32"`, or `"follows"` its inputs.
        absorbed: the share of the nonzero numbers it adds that are too small, against the sum, to count in half.
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
    rule: str = ""
    absorbed: float = 0.0

    @property
    def loses(self) -> bool:
        """Whether half would lose something worth a line."""
        return self.overflowed > 0 or self.flushed > 0.001 or self.absorbed > 0.001


@dataclasses.dataclass(frozen=True)
class NumericsReport(Report):
    """Ranges of a training program's values; `print` it.

    All values are those of a float32 run of the program, at the loss scale: the shares say what half does to them.

    Args:
        dtype: the half dtype that is asked about.
        loss_scale: the present scale.
        batches: how many batches were seen.
        activations: forward, by module: what matmuls and convolutions read and write, and what modules hand on.
        gradients: the same of the backward pass, gradients of parameters left out.
        parameters: gradients of parameters, by tree path, times the loss scale.
        by_op: all arithmetic by operation and source line, both passes, in the program's order.
        activation_gradient_exponents: how many values of `gradients` have which exponent of two, at the loss scale.
        parameter_gradient_exponents: the same of `parameters`.
        largest_safe_scale: the largest power of two at which no gradient overflows; None if gradients are all
            zero, or not finite in float32 either.
        init_scale: what to give `dynamic_loss_scale`: `largest_safe_scale / 4`, because gradients grow later, within
            that transformation's limits; 1 for bfloat16, which has float32's range.
            Computed of the values outside of `keep_float32`.
        keep_float32: modules where half overflows in the forward pass, or in the backward pass without any loss
            scale, or flushes more than 5 % of the nonzero values of the forward pass, or of the backward pass at
            `init_scale`.
        overrides: a `Policy`'s overrides that keep these in float32.
        keep_lines: operations of which the same holds that stand in no module with a name, as `exp at file.py:12`.
        half_gradient_exponents: the same as `activation_gradient_exponents`, of those that the program computes in
            half; of all if it has no half.
        unseen: operations whose insides could not be looked at (Pallas kernels, callbacks).
        errors: the relative error of the gradients in half against float32, without and with what is recommended;
            None if the program is in half already or it was not tried.
        notes: what else to know.
    """

    dtype: str
    loss_scale: float
    batches: int
    activations: tuple[Range, ...]
    gradients: tuple[Range, ...]
    parameters: tuple[Range, ...]
    by_op: tuple[Range, ...]
    activation_gradient_exponents: Mapping[int, int]
    parameter_gradient_exponents: Mapping[int, int]
    largest_safe_scale: float | None
    init_scale: float | None
    keep_float32: tuple[str, ...]
    keep_lines: tuple[str, ...] = ()
    half_gradient_exponents: Mapping[int, int] = dataclasses.field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    errors: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The page's title."""
        return f"Numerics: what {self.dtype} would lose"

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """Pairs for `Policy(overrides=...)`."""
        return tuple((f"*/{name}", "float32") for name in self.keep_float32)

    def flushed_at(self, scale: float) -> float:
        """The share of nonzero activation gradients that half would flush to zero at a loss scale.

        Gradients that the program keeps in float32, under an override for instance, do not count.

        Args:
            scale: a power of two; the exponents seen at the present scale are shifted by it.
        """
        return Limits.of(jnp.dtype(self.dtype)).flushed_share(self.half_gradient_exponents, scale / self.loss_scale)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the histogram of gradient exponents with half's window, and the ranges by module.

        Args:
            path: the file, which ends in `.svg`.

        Raises:
            ValueError: it ends otherwise.
        """
        if not os.fspath(path).endswith(".svg"):
            raise ValueError(f"NumericsReport.plot({os.fspath(path)!r}): it writes SVG; give a file that ends in .svg.")
        written(self._figure(), path)

    def _figure(self) -> str:
        rows = [row for row in (*self.activations, *self.gradients) if row.max > 0]
        spans = [
            histogram.Span(row.name or "-", math.log2(row.min_nonzero), math.log2(row.max), row.phase == "backward")
            for row in rows
        ]
        histograms = {
            "gradients of activations": self.activation_gradient_exponents,
            "gradients of parameters": self.parameter_gradient_exponents,
        }
        return histogram.svg(self.dtype, self.loss_scale, histograms, spans)

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {**dataclasses.asdict(self), "overrides": self.overrides}

    def table(self) -> list[dict[str, Any]]:
        """The ranges by operation, module and line."""
        return [{**dataclasses.asdict(row), "dtypes": "/".join(row.dtypes)} for row in self.by_op]

    def sections(self) -> list[Section]:
        """The report for people."""
        header = ("in", "max", "min nonzero", "zeros", "flushed", "overflowed")
        at_scale = f"At loss scale {_scale(self.loss_scale)}."
        tables = (
            ("Activations by module", "", "module", self.activations),
            ("Gradients of activations by module", at_scale, "module", self.gradients),
            ("Gradients of parameters", at_scale, "parameter", self.parameters),
        )
        ops = ("op", "line", "pass", "in", "max", "flushed", "overflowed", "absorbed", "module")
        losing = sorted(
            (row for row in self.by_op if row.loses), key=lambda r: (-r.overflowed, -max(r.flushed, r.absorbed))
        )
        by_op = f"Of {len(self.by_op)} operations these would lose something if they ran in {self.dtype}."
        return [
            Section("", self._summary(), figure=self._figure()),
            *(
                Section(title, text, (what, *header), [*map(_cells, _folded(rows))], {2, 3, 4, 5, 6})
                for title, text, what, rows in tables
            ),
            Section("By operation", by_op, ops, [*map(_op_cells, losing)], {4, 5, 6, 7}),
        ]

    def _summary(self) -> str:
        lines = [*self._verdict(), *self._scale_advice()]
        if self.keep_float32:
            pairs = ", ".join(f'("{pattern}", "{dtype}")' for pattern, dtype in self.overrides)
            lines.append(f"keep in float32: overrides=({pairs},)")
        if self.keep_lines:
            lines.append(
                f"keep in float32, in no module with a name (mpjax.float_function): {'; '.join(self.keep_lines)}"
            )
        if self.errors:
            before, after = (f"{error:.2%}" if math.isfinite(error) else "not finite" for error in self.errors)
            lines.append(f"tried under autocast: error of the gradients {before} as it is, {after} with this")
        lines += [f"not looked into: {place}" for place in self.unseen]
        lines += self.notes
        lines.append(
            f"Ranges of {self.batches} batch{'es' if self.batches != 1 else ''}, run in float32, against {self.dtype}; "
            f"loss scale {_scale(self.loss_scale)}."
        )
        return "\n".join(lines)

    def _verdict(self) -> list[str]:
        lost = len(self.keep_float32) + len(self.keep_lines)
        if lost:
            return [f"{self.dtype} loses values in {lost} place{'s' if lost > 1 else ''} that should stay in float32"]
        if self.unseen:
            return [f"nothing seen that has to stay in float32, but {len(self.unseen)} operations were not looked into"]
        if suspects := self._suspects():
            first = f"{suspects[0].op} at {suspects[0].source or 'an unknown line'}"
            return [
                f"{len(suspects)} operations overflow {self.dtype} if they run in it (first {first}): autocast runs "
                "those after the last matmul in float32; in half by hand or by with_policy, cast before them"
            ]
        return ["no module needs to be kept in float32 for its range"]

    def _suspects(self) -> list[Range]:
        """Forward operations beside matmuls and module outputs that overflow in half, unless they run in float32."""
        half = any(self.dtype in row.dtypes for row in self.by_op)
        return [
            row
            for row in self.by_op
            if row.phase == "forward"
            and row.overflowed
            and row.rule not in ("float32", "as traced")
            and (not half or self.dtype in row.dtypes)
        ]

    def _scale_advice(self) -> list[str]:
        if self.largest_safe_scale is None or self.init_scale is None:
            return ["Gradients are all zero, or not finite in float32 either: mpjax.find_nonfinite says where."]
        if self.init_scale == 1 and self.dtype == "bfloat16":
            why = "(float32's range: none is needed)"
        elif self.init_scale == self.largest_safe_scale / 4:
            why = "(a quarter of that)"
        else:
            why = (
                f"(the nearest that is allowed to a quarter of the largest safe one, {_scale(self.largest_safe_scale)})"
            )
        scales = dict.fromkeys((1.0, self.loss_scale, self.init_scale))
        shares = ", ".join(f"{self.flushed_at(s):.2%} at scale {_scale(s)}" for s in scales)
        rest = " of all the others" if self.keep_float32 or self.keep_lines else ""
        return [
            f"largest safe loss scale{rest}: {_scale(self.largest_safe_scale)}; recommended: "
            f"init_scale={_scale(self.init_scale).replace('2^', '2.0**')} {why}",
            f"activation gradients flushed to zero: {shares}",
        ]


def _folded(rows: Sequence[Range]) -> list[Range]:
    """The rows, those of repeated modules together, those that lose most first."""
    return sorted(folded_rows(rows, _together), key=lambda row: (-row.overflowed, -row.flushed))


def _together(a: Range, b: Range) -> Range:
    """Two rows as one; shares are those of all their values."""
    count = a.count + b.count
    shares = {
        name: (a.count * getattr(a, name) + b.count * getattr(b, name)) / max(count, 1)
        for name in ("zeros", "flushed", "overflowed", "absorbed")
    }
    return dataclasses.replace(
        a,
        max=max(a.max, b.max),
        min_nonzero=min(a.min_nonzero, b.min_nonzero),
        count=count,
        nonfinite=a.nonfinite + b.nonfinite,
        **shares,
    )


def _cells(row: Range) -> tuple[str, ...]:
    low = f"{row.min_nonzero:.3g}" if math.isfinite(row.min_nonzero) else "-"
    shares = (f"{row.zeros:.1%}", percent(row.flushed), percent(row.overflowed))
    return (row.name or "-", short_dtypes(row.dtypes), f"{row.max:.4g}", low, *shares)


def _op_cells(row: Range) -> tuple[str, ...]:
    shares = (percent(row.flushed), percent(row.overflowed), percent(row.absorbed))
    return (row.op, row.source, row.phase, short_dtypes(row.dtypes), f"{row.max:.4g}", *shares, row.name or "-")


def _scale(scale: float) -> str:
    """A loss scale for people: powers of two above what fits as such."""
    return f"{scale:g}" if scale < 2**20 else f"2^{round(math.log2(scale))}"
