"""What `numerics` found: ranges by module, parameter and operation, the histogram of gradients, the loss scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax.inspection.numerics import histogram
from mpjax.inspection.numerics.range_statistics import Limits
from mpjax.inspection.reports import Report, Section


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
        keep_float32: modules where half overflows in the forward pass, or flushes more than 5 % of the nonzero
            values of the forward pass, or of the backward pass at `init_scale`.
        overrides: a `Policy`'s overrides that keep these in float32.
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

        Args:
            scale: a power of two; the exponents seen at the present scale are shifted by it.
        """
        shift = round(math.log2(scale / self.loss_scale))
        lowest = Limits.of(jnp.dtype(self.dtype)).exponents[0]
        total = sum(self.activation_gradient_exponents.values())
        lost = sum(n for e, n in self.activation_gradient_exponents.items() if e + shift < lowest)
        return lost / max(total, 1)

    def plot(self, path: Any) -> None:
        """Draws the histogram of gradient exponents with half's window, and the ranges by module.

        Args:
            path: the image file; its ending says the format, as matplotlib reads it.

        Raises:
            ImportError: matplotlib, of the extra `mpjax[plot]`, is not installed.
        """
        histogram.plot(self, path)

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {**dataclasses.asdict(self), "overrides": self.overrides}

    def table(self) -> list[dict[str, Any]]:
        """The ranges by operation, module and line."""
        return [{**dataclasses.asdict(row), "dtypes": "/".join(row.dtypes)} for row in self.by_op]

    def sections(self) -> list[Section]:
        """The report for people."""
        header = ("", "in", "max", "min nonzero", "zeros", "flushed", "overflowed")
        right = {2, 3, 4, 5, 6}
        ops = ("op", "line", "pass", "in", "max", "flushed", "overflowed", "absorbed", "module")
        losing = sorted(
            (row for row in self.by_op if row.loses), key=lambda r: (-r.overflowed, -max(r.flushed, r.absorbed))
        )
        by_op = f"Of {len(self.by_op)} operations these would lose something if they ran in {self.dtype}."
        return [
            Section("", self._summary(), figure=histogram.svg(self)),
            Section("Activations by module", "", ("module", *header[1:]), [*map(_cells, self.activations)], right),
            Section(
                "Gradients of activations by module",
                f"At loss scale {_scale(self.loss_scale)}.",
                ("module", *header[1:]),
                [*map(_cells, self.gradients)],
                right,
            ),
            Section(
                "Gradients of parameters",
                f"At loss scale {_scale(self.loss_scale)}.",
                ("parameter", *header[1:]),
                [*map(_cells, self.parameters)],
                right,
            ),
            Section("By operation", by_op, ops, [*map(_op_cells, losing)], {4, 5, 6, 7}),
        ]

    def _summary(self) -> str:
        lines = [
            f"Ranges of {self.batches} batch{'es' if self.batches != 1 else ''}, run in float32, against {self.dtype}; "
            f"loss scale {_scale(self.loss_scale)}."
        ]
        if self.largest_safe_scale is None:
            lines.append("Gradients are all zero, or not finite in float32 either: mpjax.find_nonfinite says where.")
        else:
            lines.append(
                f"largest safe loss scale: {_scale(self.largest_safe_scale)}; recommended: "
                f"init_scale={_scale(self.init_scale or 1.0).replace('2^', '2.0**')} "
                + ("(float32's range: none is needed)" if self.init_scale == 1 else "(a quarter of it, at most 2^24)")
            )
            scales = dict.fromkeys((1.0, self.loss_scale, self.init_scale or 1.0))
            shares = ", ".join(f"{self.flushed_at(s):.2%} at scale {_scale(s)}" for s in scales)
            lines.append(f"activation gradients flushed to zero: {shares}")
        if self.keep_float32:
            pairs = ", ".join(f'("{pattern}", "{dtype}")' for pattern, dtype in self.overrides)
            lines.append(f"keep in float32: overrides=({pairs},)")
        else:
            lines.append("no module needs to be kept in float32 for its range")
        return "\n".join(lines)


def _cells(row: Range) -> tuple[str, ...]:
    low = f"{row.min_nonzero:.3g}" if math.isfinite(row.min_nonzero) else "-"
    shares = (f"{row.zeros:.1%}", _share(row.flushed), _share(row.overflowed))
    return (row.name or "-", _short(row.dtypes), f"{row.max:.4g}", low, *shares)


def _op_cells(row: Range) -> tuple[str, ...]:
    shares = (_share(row.flushed), _share(row.overflowed), _share(row.absorbed))
    return (row.op, row.source, row.phase, _short(row.dtypes), f"{row.max:.4g}", *shares, row.name or "-")


def _short(dtypes: Sequence[str]) -> str:
    return "/".join(dtype.replace("bfloat", "bf").replace("float", "f") for dtype in dtypes)


def _scale(scale: float) -> str:
    """A loss scale for people: powers of two above what fits as such."""
    return f"{scale:g}" if scale < 2**20 else f"2^{round(math.log2(scale))}"


def _share(share: float) -> str:
    if share == 0:
        return "0"
    return f"{share:.2%}" if share >= 0.0001 else f"{share:.0e}"
