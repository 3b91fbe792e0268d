"""The report of `find_nonfinite`: the operation, its operands, the element and the diagnosis."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mpjax.inspection.reports import Report, Section, array_text


@dataclasses.dataclass(frozen=True)
class OperandRange:
    """The range of an array.

    Args:
        dtype, shape: Dtype and shape of the array.
        min, max: Minimum and maximum of its finite elements; inf and -inf if there are none.
        min_nonzero: Smallest magnitude of a nonzero finite element; inf if there are none.
        nonfinite: Number of elements that are inf or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    min: float
    max: float
    min_nonzero: float
    nonfinite: int

    def __str__(self) -> str:
        shape = array_text(self)
        text = f"{shape} in [{self.min:.4g}, {self.max:.4g}]"
        if self.min > self.max:
            text = f"{shape} with no finite element"
        elif math.isfinite(self.min_nonzero):
            text += f", smallest nonzero {self.min_nonzero:.3g}"
        return text + (f", {self.nonfinite} inf or NaN" if self.nonfinite else "")


@dataclasses.dataclass(frozen=True)
class NonFinite(Report):
    """The source of an inf or NaN. Print it to read the report.

    Args:
        primitive: JAX's name of the operation; `"argument"` if the inf or NaN was in an argument of the function.
        module: Module path, from named scopes.
        source: The source line, as `file.py:12`.
        kind: `"inf"` or `"nan"`, the kind of the first such element.
        diagnosis: The value of the same point in float32, the cause and the fix, in words.
        direction: `"forward"` or `"backward"`; operations that a remat recomputes count as forward.
        iteration: Index in the enclosing loop, in the order of `scan`'s inputs; a tuple for nested loops, outermost
            first; None outside loops.
        inputs: The ranges of the operation's floating inputs.
        output: Dtype and shape of its result, as `float16[8,4]`.
        count: Number of elements of the result that are inf or NaN.
        element: Index of the first of them that reaches the result; inside `shard_map`, the index on its device.
        float32_value: The value of that element in float32; None if it was not reached there.
        argument: Tree path of the argument that held the inf or NaN, if one did.
        result: Tree path of the first result of the function that is not finite, as `result[0]['w']`.
        device: Coordinates of the device inside `shard_map`, as `data=2`.
        unseen: Operations of the program of which only operands and results are visible, and why.
    """

    primitive: str
    module: str
    source: str
    kind: str
    diagnosis: str
    direction: str = "forward"
    iteration: int | tuple[int, ...] | None = None
    inputs: tuple[OperandRange, ...] = ()
    output: str = ""
    count: int = 0
    element: tuple[int, ...] = ()
    float32_value: float | None = None
    argument: str | None = None
    result: str | None = None
    device: str | None = None
    unseen: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The page's title."""
        return f"{'inf' if self.kind == 'inf' else 'NaN'} found"

    def to_dict(self) -> dict[str, Any]:
        """The report as a dictionary."""
        return {"found": dataclasses.asdict(self)}

    def table(self) -> list[dict[str, Any]]:
        """One row, without the operands."""
        row = dataclasses.asdict(self)
        del row["inputs"]
        return [row]

    def failure(self) -> str:
        """The failure message; the command line exits with status 1."""
        return self.title

    def sections(self) -> list[Section]:
        """The sections of the printed report."""
        return [Section("", self._text())]

    def _text(self) -> str:
        what = "inf" if self.kind == "inf" else "NaN"
        if self.argument is not None:
            return f"{what} in {self.argument}: {self.diagnosis}"
        where = f"{self.primitive} at {self.source or 'an unknown line'}"
        lines = [
            f"{what} made by {where}, module {self.module or '-'}, {self.direction} pass"
            + (f", iteration {self.iteration}" if self.iteration is not None else ""),
            f"  {self.diagnosis}",
            f"  output {self.output}: {self.count} inf or NaN, the first that reaches the result is {self.element}"
            + (f" of device {self.device}" if self.device else ""),
        ]
        lines += [f"  {self.result} is not finite"] if self.result not in (None, "result") else []
        lines += [f"  input {i}: {operand}" for i, operand in enumerate(self.inputs)]
        return "\n".join([*lines, *(f"  not inspected: {place}" for place in self.unseen)])
