"""The report of `find_nonfinite`: the operation, its operands, the element and the diagnosis: the cause and the fix."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from mpjax.inspection.auditing.constants import Lost
from mpjax.inspection.reports import Report, Section, array_text
from mpjax.program import compat

# By name: each operation has its own reason for an inf or NaN.


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
        elif math.isfinite(self.min_nonzero) and "int" not in self.dtype:
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
        iterations: The number of iterations in which the operation made an inf or NaN.
        inputs: The ranges of the operation's inputs, of numbers.
        output: Dtype and shape of its result, as `float16[8,4]`.
        count: Number of elements of the result that are inf or NaN.
        element: Index of the first of them that reaches the result; inside `shard_map`, the index on its device.
        float32_value: The value of that element in float32; None if it was not reached there.
        argument: Tree path of the argument that held the inf or NaN, if one did.
        result: Tree path of the first result of the function that is not finite, as `result[0]['w']`.
        device: Coordinates of the device inside `shard_map`, as `data=2`.
        unseen: Operations of the program of which only operands and results are visible, and why.
        others: Other sources, of the same result or of others, in words.
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
    others: tuple[str, ...] = ()
    iterations: int = 1

    @property
    def title(self) -> str:
        """The page's title."""
        return f"{self._what} found"

    @property
    def _what(self) -> str:
        return "inf" if self.kind == "inf" else "NaN"

    @property
    def _made(self) -> str:
        return f"{self._what} made by {self.primitive} at {self.source or 'an unknown line'}"

    @property
    def _turn(self) -> str:
        more = f" and {self.iterations - 1} more" if self.iterations > 1 else ""
        return f", iteration {self.iteration}{more}" if self.iteration is not None else ""

    @property
    def line(self) -> str:
        """The source and the diagnosis in one line."""
        if self.argument is not None:
            return f"{self._what} in {self.argument} before the call"
        return f"{self._made}{self._turn}: {self.diagnosis}"

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
        what = self._what
        others = [f"  another cause: {other}" for other in self.others]
        if self.argument is not None:
            return "\n".join([f"{what} in {self.argument}: {self.diagnosis}", *others])
        lines = [
            f"{self._made}, module {self.module or '-'}, {self.direction} pass{self._turn}",
            f"  {self.diagnosis}",
            *others,
            f"  output {self.output}: {self.count} inf or NaN, the first that reaches the result is {self.element}"
            + (f" of device {self.device}" if self.device else ""),
        ]
        lines += [f"  {self.result} is not finite"] if self.result not in (None, "result") else []
        lines += [f"  input {i}: {operand}" for i, operand in enumerate(self.inputs)]
        return "\n".join([*lines, *(f"  not inspected: {place}" for place in self.unseen)])


@dataclasses.dataclass(frozen=True)
class Symptoms:
    """The measurements at the operation that made an inf or NaN.

    Args:
        primitive: The operation.
        kind: `"inf"` or `"nan"`.
        half: The half dtype of the operation, or else of the program; None if there is none.
        half_here: Whether the operation itself reads or returns half.
        operands: The operand elements that the element was computed from; NaN where there is no single one (a matmul).
        operands32: The same when the whole program runs in float32; empty if the point was not reached there.
        local: The element if only this operation runs in float32.
        float32: The element if the whole program runs in float32; None if the point was not reached there.
        backward: Whether the operation belongs to the backward pass.
        scaled: Whether it depends on the cotangent of the loss, which a loss scale multiplies.
        derivative: Whether the forward pass computes it for the derivative alone.
        of_sqrt: Whether it is the derivative of a square root.
        float8: The float8 dtype of its result; empty for other dtypes.
        constant: Whether the operation only reads an infinite constant.
        opaque: Whether the operation can run only in the dtypes it was traced for.
        constants: The constants that rounding made zero, one or inf.
        doubtful: Whether a constant of the line is zero in half, and it is not known what was written.
        masked: Whether it subtracts the maximum of a row from the row.
        index: The index out of bounds with which a gather made it, in words.
        rounding: What was rounded before, if the operation amplifies it, and the line that rounded it.
        argument: The argument that the operation casts; empty if it is no such cast.
        where_gradient: Whether the fault only matters in the backward pass, which has a `where` that selects zeros.
        float32_is_fine: Returns whether the function is finite when traced in float32; None if unknown.
    """

    primitive: str
    kind: str
    half: str | None
    half_here: bool
    operands: tuple[float, ...]
    operands32: tuple[float, ...]
    local: float
    float32: float | None
    backward: bool
    constant: bool
    scaled: bool = True
    derivative: bool = False
    of_sqrt: bool = False
    float8: str = ""
    opaque: bool = False
    constants: Sequence[Lost] = ()
    doubtful: bool = False
    rounding: str = ""
    masked: bool = False
    index: str = ""
    argument: str = ""
    where_gradient: bool = False
    float32_is_fine: Callable[[], bool | None] = lambda: False


_WHERE_GRADIENT = (
    "the gradient of a where: the branch that is not selected is not finite here, and 0 × inf is NaN in the backward "
    "pass; give it a valid argument: jnp.where(ok, f(jnp.where(ok, x, 1)), 0)"
)


_OUT_OF_BOUNDS = "out of bounds, for which jnp.take and x[i] in mode 'fill' return NaN"
_SQRT = "the derivative of a square root at zero is infinite (sqrt(x + epsilon) has a finite one)"


def diagnosis_of(found: Symptoms) -> str:
    """The cause and the fix, in one sentence."""
    if found.constant:
        what = "an infinite constant" if found.kind == "inf" else "a constant NaN"
        return f"{what} of the program, read here, reaches the result: check the mask or the initial value"
    if found.float8 and found.operands and math.isfinite(found.operands[0]):
        return (
            f"overflow of {found.float8} here ({number(found.operands[0])} is beyond its largest number): scale the "
            "values before the cast"
        )
    cause = _SQRT if found.of_sqrt else _cause(found.primitive, found.operands, found.kind)
    if cause and found.masked:
        cause += ": the softmax of a row that holds only -inf, as one that is masked as a whole"
    if cause and found.index:
        cause = f"{found.index} is {_OUT_OF_BOUNDS}"
    if found.derivative and cause and not found.of_sqrt:
        cause = f"a derivative that is not finite here: {cause}"
    value = found.local if found.float32 is None else found.float32
    grows = found.kind == "inf" and found.primitive in GROWING and not any(map(math.isinf, found.operands))
    if not cause and not math.isfinite(value) and grows:
        cause = "overflow of the operation's own dtype"
        terms = f" {_SIGNS[found.primitive]} ".join(map(number, found.operands)) if found.primitive in _SIGNS else ""
        cause += f" ({terms})" if terms and all(map(math.isfinite, found.operands)) else ""
    causes = [cause] if cause else []
    if not math.isfinite(value):
        fine = found.float32_is_fine() if found.half else False
        if fine:
            text = f"{found.half} alone: traced with float32 arguments, all results are finite"
            return "; ".join([*causes, *_named(found), f"{text}: keep this part in float32"])
        if found.where_gradient:
            return "; ".join([*causes, _WHERE_GRADIENT])
        if not fine and found.constants:
            cure = f"write one that it holds, such as {', '.join(dict.fromkeys(x.instead for x in found.constants))}"
            cure += ", or keep this part in float32" if fine is None else ""
            return "; ".join([*causes, *_lost_constants(found), cure])
        if fine is None and (found.opaque or (found.doubtful and _divides_by_zero(cause))):
            why = f"{found.primitive} can't be run in another dtype" if found.opaque else "a constant may be rounded"
            return "; ".join([*causes, f"cannot tell whether float32 fails too ({why}): trace the function in float32"])
        fails = "float32 fails too" if found.half else "the program is in float32 here"
        return "; ".join([*causes, f"{fails}: check the data or the model"])
    if found.half is None:  # the float32 run is the same program
        return "; ".join([*causes, "check the data or the model"])
    shown = f"(float32 value {number(value)})"
    if found.kind == "inf" and found.half_here and not _divides_by_zero(cause):
        text = f"overflow of {found.half} here {shown}"
        if found.argument:
            text += (
                f"; it is in {found.argument}, so no loss scale changes it: scale it down, keep this line in float32, "
                "or use bfloat16"
            )
        if found.backward and found.scaled:
            text += "; in the backward pass: if the loss is scaled, a smaller loss scale may keep it in range"
        return text
    text = "; ".join([f"{cause or 'NaN'} in {found.half} alone {shown}{_lost(found, cause)}", *_named(found)])
    return f"{text}: keep {'what it reads' if found.rounding else 'this part'} in float32"


def _named(found: Symptoms) -> list[str]:
    """The lines that caused the fault, where they are others than its own."""
    return [*_lost_constants(found), *([found.rounding] if found.rounding else [])]


def _lost_constants(found: Symptoms) -> list[str]:
    return [*dict.fromkeys(f"{lost.text}, at {lost.site.source}" for lost in found.constants)]


# From finite operands, an infinite result of these is an overflow.
GROWING = "mul add sub add_any dot_general conv_general_dilated reduce_sum cumsum integer_pow square".split()


_SIGNS = {"add": "+", "add_any": "+", "sub": "-", "mul": "*"}


def number(value: float) -> str:
    """A number formatted for reading: `91,200`, `0.001234`, `1.2e+09`."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _divides_by_zero(cause: str) -> bool:
    return "zero" in cause


def _lost(found: Symptoms, cause: str) -> str:
    """The operand that is zero in the half dtype alone, flushed here or before, as a clause; empty if there is none."""
    for here, there in zip(found.operands, found.operands32, strict=False):
        if here == 0 and there != 0 and math.isfinite(there) and _divides_by_zero(cause):
            if abs(there) > float(compat.finfo(found.half).smallest_subnormal):
                return f", because it reads 0 in {found.half} where float32 has {number(there)}"
            return f", because {found.half} flushed {number(there)} to zero"
    return ""


# Causes that the operands x and y of an operation show: the first row whose condition on them and on the kind is met.
_CAUSES: tuple[tuple[str, Callable[[float, float, str], bool], str], ...] = (
    ("div rem", lambda x, y, kind: x == y == 0, "0/0, a division of zero by zero"),
    ("div rem", lambda x, y, kind: y == 0, "division by zero"),
    ("log log2", lambda x, y, kind: x == 0, "log of zero"),
    ("log log2", lambda x, y, kind: x < 0, "log of a negative number ({x})"),
    ("log1p", lambda x, y, kind: x == -1, "log of zero"),
    ("log1p", lambda x, y, kind: x < -1, "log of a negative number (1 + {x})"),
    ("sqrt rsqrt", lambda x, y, kind: x < 0, "square root of a negative number ({x})"),
    ("rsqrt", lambda x, y, kind: x == 0, "division by zero (rsqrt of zero)"),
    ("pow integer_pow", lambda x, y, kind: x == 0, "a negative power of zero"),
    ("pow", lambda x, y, kind: x < 0 and kind == "nan", "a fractional power of a negative number ({x})"),
    ("asin acos atanh erf_inv", lambda x, y, kind: abs(x) >= 1, "{primitive} of {x}, outside its domain"),
    ("acosh", lambda x, y, kind: x < 1, "{primitive} of {x}, outside its domain"),
    ("exp exp2 expm1", lambda x, y, kind: kind == "inf" and math.isfinite(x), "exponential of {x}"),
    ("sub add add_any", lambda x, y, kind: kind == "nan", "inf - inf"),
    ("mul", lambda x, y, kind: kind == "nan", "0 * inf"),
    ("cholesky", lambda x, y, kind: True, "its matrix is not positive definite"),
    ("custom_linear_solve triangular_solve", lambda x, y, kind: True, "its matrix is singular"),
    ("gather", lambda x, y, kind: kind == "nan", f"an index {_OUT_OF_BOUNDS}"),
)


def _cause(primitive: str, operands: tuple[float, ...], kind: str) -> str:
    """The cause in words if the operands show it; empty otherwise."""
    x, y, *_ = (*operands, math.nan, math.nan)
    rows = (text for names, is_met, text in _CAUSES if primitive in names.split() and is_met(x, y, kind))
    return next(rows, "").format(primitive=primitive, x=number(x))
