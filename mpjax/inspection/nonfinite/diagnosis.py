"""The cause of an inf or NaN in words, from what was measured there and from the dataflow around it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpjax.inspection.auditing.amplified import amplified, makes_integers
from mpjax.inspection.auditing.constants import Lost, extreme, lost_constants, unexplained
from mpjax.inspection.auditing.scaled_gradients import follows_cotangent, repeats
from mpjax.program import compat
from mpjax.program.dtypes import is_float, is_half
from mpjax.program.inlining import Flow, Node, Value
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import BACKWARD
from mpjax.program.tracing import TracedCall

# By name: each operation has its own reason for an inf or NaN, and each form of a cause its own operations.


@dataclasses.dataclass(frozen=True)
class Symptoms:
    """The measurements at the operation that made an inf or NaN.

    Args:
        flow, node: The program, and the operation in it.
        ranges: The ranges of its operands.
        kind: `"inf"` or `"nan"`.
        half: The half dtype of the operation, or else of the program; None if there is none.
        operands: The operand elements that the element was computed from; NaN where there is no single one (a matmul).
        operands32: The same when the whole program runs in float32; empty if the point was not reached there.
        local: The element if only this operation runs in float32.
        float32: The element if the whole program runs in float32; None if the point was not reached there.
        backward: Whether the operation belongs to the backward pass.
        derivative: Whether the forward pass computes it for the derivative alone.
        float8: The float8 dtype of its result; empty for other dtypes.
        constant: Whether the operation only reads an infinite constant.
        constants: The constants that rounding made zero, one or inf.
        doubtful: A constant that is 0, 1 or inf in half, in words, if it is not known what was written; empty if none.
        argument: The argument that the operation casts; empty if it is no such cast.
        where_gradient: Whether the fault only matters in the backward pass, which has a `where` that selects zeros.
        behind: The first inf or NaN made before, on which the operation depends although it reads none; empty if none.
        float32_is_fine: Returns whether the function is finite when traced in float32; None if unknown.
    """

    flow: Flow
    node: Node
    ranges: Sequence[Any]
    kind: str
    half: str | None
    operands: tuple[float, ...]
    operands32: tuple[float, ...]
    local: float
    float32: float | None
    backward: bool
    constant: bool
    derivative: bool
    float8: str
    constants: Sequence[Lost]
    doubtful: str
    argument: str
    where_gradient: bool
    behind: str
    float32_is_fine: Callable[[], bool | None]


_WHERE_GRADIENT = (
    "the gradient of a where: the branch that is not selected is not finite here, and 0 × inf is NaN in the backward "
    "pass; give it a valid argument: jnp.where(ok, f(jnp.where(ok, x, 1)), 0)"
)


_OUT_OF_BOUNDS = "out of bounds, for which jnp.take and x[i] in mode 'fill' return NaN"
_SQRT = "the derivative of a square root at zero is infinite (sqrt(x + epsilon) has a finite one)"


def diagnosis_of(found: Symptoms) -> str:
    """The cause and the fix, in one sentence."""
    flow, node, name = found.flow, found.node, found.node.site.name
    if found.constant:
        what = "an infinite constant" if found.kind == "inf" else "a constant NaN"
        return f"{what} of the program, read here, reaches the result: check the mask or the initial value"
    if found.float8 and found.operands and math.isfinite(found.operands[0]):
        return (
            f"overflow of {found.float8} here ({number(found.operands[0])} is beyond its largest number): scale the "
            "values before the cast"
        )
    of_sqrt = found.derivative and is_half_over_sqrt(flow, node)
    cause = _SQRT if of_sqrt else _cause(name, found.operands, found.kind)
    if cause and is_of_softmax(flow, node):
        cause += ": the softmax or logsumexp of a row that holds only -inf, as one that is masked as a whole"
    if cause and (index := index_out_of_bounds(flow, node, found.ranges)):
        cause = f"{index} is {_OUT_OF_BOUNDS}"
    if found.derivative and cause and not of_sqrt:
        cause = f"a derivative that is not finite here: {cause}"
    value = found.local if found.float32 is None else found.float32
    grows = overflows(name, found.operands, found.kind) and not any(map(math.isinf, found.operands))
    if not cause and not math.isfinite(value) and grows:
        cause = "overflow of the operation's own dtype"
        terms = f" {_SIGNS[name]} ".join(map(number, found.operands)) if name in _SIGNS else ""
        cause += f" ({terms})" if terms and all(map(math.isfinite, found.operands)) else ""
    causes = [cause] if cause else []
    lost = [*dict.fromkeys(f"{constant.text}, at {constant.site.source}" for constant in found.constants)]
    rounding = amplified_rounding(flow, node)
    elsewhere = [*lost, rounding] if rounding else lost
    if not math.isfinite(value):
        fine = found.float32_is_fine() if found.half else False
        if fine:
            text = f"{found.half} alone: traced with float32 arguments, all results are finite"
            return "; ".join([*causes, *elsewhere, f"{text}: keep this part in float32"])
        if not fine and found.constants:
            cure = "keep this part in float32, or " if fine is None else ""  # which changes no result
            cure += f"write one that it holds, such as {', '.join(dict.fromkeys(x.instead for x in found.constants))}"
            return "; ".join([*causes, *lost, cure])
        if found.where_gradient:
            return "; ".join([*causes, _WHERE_GRADIENT])
        is_opaque = primitive(name).op is Op.OPAQUE
        if fine is None and (is_opaque or (found.doubtful and (_divides_by_zero(cause) or cause == "0 * inf"))):
            why = f"{name} can't be run in another dtype" if is_opaque else f"{found.doubtful} may have been rounded"
            return "; ".join([*causes, f"cannot tell whether float32 fails too ({why}): trace the function in float32"])
        fails = "float32 fails too" if found.half else "the program is in float32 here"
        return "; ".join([*causes, f"{fails}: check the data or the model"])
    if found.half is None:  # the float32 run is the same program
        return "; ".join([*causes, "check the data or the model"])
    shown = f"(float32 value {number(value)})"
    in_half = any(map(is_half, (*node.site.outvars[:1], *node.site.invars)))
    if found.kind == "inf" and in_half and not _divides_by_zero(cause):
        text = f"overflow of {found.half} here {shown}"
        if adds_constant(flow, node, value):
            text += f"; it is a constant of the program: {extreme(value)}"
        if found.argument:
            text += (
                f"; it is in {found.argument}, so no loss scale changes it: scale it down, keep this line in float32, "
                "or use bfloat16"
            )
        if found.backward and follows_cotangent(flow, node):
            text += "; in the backward pass: if the loss is scaled, a smaller loss scale may keep it in range"
        return text
    zero = _lost(found, cause)
    here = f"{cause or 'NaN'} in {found.half} alone {shown}{zero}"
    if zero and found.behind:  # such as a quotient by an inf
        elsewhere, rounding = [*lost, f"it depends on {found.behind}"], found.behind
    kept = "what it reads" if zero or rounding else "this part"
    return f"{'; '.join([here, *elsewhere])}: keep {kept} in float32"


# From finite operands, an infinite result of these is an overflow.
_GROWING = "mul add sub add_any dot_general conv_general_dilated reduce_sum cumsum integer_pow square".split()


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
    ("lgamma digamma", lambda x, y, kind: x <= 0, "{primitive} of {x}, a pole"),
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


def overflows(primitive: str, operands: tuple[float, ...], kind: str) -> bool:
    """Whether a result of an operation that is not finite is too large for its dtype, and is not at a pole."""
    return kind == "inf" and primitive in _GROWING and not _cause(primitive, operands, kind)


# What the dataflow around a fault shows: constants, indices, derivatives, a softmax, a `where`.


def constants_lost(flow: Flow, node: Node, original: Callable[[], TracedCall], ones: bool) -> tuple[list[Lost], str]:
    """The constants that rounding made zero or inf; and another that the operation reads, which may be one, in words.

    With `ones`, also those that became one and that the operation depends on, as 1 - 0.999 does.
    """
    reached = set(flow.reached(node.reads))
    nodes, line = [each for each in flow.eqns if not each.inner], node.site.source
    read = [each for each in flow.eqns if each is node or not reached.isdisjoint(each.writes)]
    here = {id(each.site.eqn) for each in (*read, *(each for each in nodes if each.site.source == line))}
    found = [lost for lost in lost_constants(nodes, original, is_float) if lost.written is not None]
    near = [lost for lost in found if id(lost.site.eqn) in here and (ones or abs(lost.value) != 1)]
    matters = (each for each in nodes if each is node or not _starts_a_scatter(flow, each))
    doubtful = unexplained(each.site for each in matters if id(each.site.eqn) in here)
    return near or [lost for lost in found if abs(lost.value) != 1], doubtful


def _starts_a_scatter(flow: Flow, node: Node) -> bool:
    """Whether only sums of a scatter read a result."""
    rows = [primitive(each.site.name) for each in flow.readers.get(node.writes[0], ())]
    return all(row.kernel and row.accumulates for row in rows)


def index_out_of_bounds(flow: Flow, node: Node, ranges: Sequence[Any]) -> str:
    """The index with which a gather reads outside of an array, in words; empty if there is none."""
    eqn = node.site.eqn
    if node.site.name != "gather" or len(axes := eqn.params["dimension_numbers"].start_index_map) != 1:
        return ""
    size, (low, high, *_) = eqn.invars[0].aval.shape[axes[0]], ranges[1]
    last = size - eqn.params["slice_sizes"][axes[0]]
    bad = [int(i) for i in (high, low) if not 0 <= i <= last]
    # NumPy's indexing adds the size to a negative one.
    maker = flow.maker(flow.source(node.reads[1], repeats))
    added = size if maker is not None and maker.site.name == "select_n" and bad and bad[0] < 0 else 0
    return f"index {bad[0] - added} of an axis of {size}" if bad else ""


def is_of_softmax(flow: Flow, node: Node) -> bool:
    """Whether an equation takes the maximum of a row from the row, or reads the sum of the exponentials of that."""

    def exponent(each: Node) -> Iterable[Value]:
        return each.reads if repeats(each) or each.site.name in ("reduce_sum", "exp", "abs") else ()

    def bound(each: Node) -> Iterable[Value]:
        return each.reads if repeats(each) or each.site.name in ("max", "select_n") else ()

    ends = node.reads[:1] if node.site.name == "log" else node.reads[1:] if node.site.name == "div" else ()
    made = [node, *flow.made_by(ends, exponent)]
    return any(
        flow.source(each.reads[0], repeats) is flow.source(row.reads[0], repeats)
        for row in made
        if row.site.name == "sub"
        for each in flow.made_by(row.reads[1:], bound)
        if each.site.name == "reduce_max"
    )


def cast_input(flow: Flow, node: Node) -> int | None:
    """The index of the program's input that an equation casts; None if it casts a computed value, or is no cast."""
    if primitive(node.site.name).op is not Op.CONVERT:
        return None
    source = flow.source(node.reads[0], repeats)
    return flow.inputs.index(source) if source in flow.inputs else None


def adds_constant(flow: Flow, node: Node, value: float) -> bool:
    """Whether a value is that of a constant of the program, such as a mask's, up to its sign and to smaller terms."""

    def through(each: Node) -> Iterable[Value]:
        row = primitive(each.site.name)
        return each.reads if repeats(each) or row.adds or row.scales or each.site.name == "select_n" else ()

    read = (v.constant for each in flow.made_by(node.writes, through) for v in each.reads if is_float(v))
    sizes = (abs(float(np.ravel(c)[0])) for c in read if c is not None and np.size(c) == 1)
    return any(math.isclose(abs(value), size, rel_tol=1e-3) for size in sizes)


def amplified_rounding(flow: Flow, node: Node) -> str:
    """The rounding that an operation amplifies, or one of its line or its indices, in words; empty if there is none."""
    before = {id(each.site.eqn) for each in (node, *flow.before(node.reads))}
    found = [x for x in amplified(flow)[0] if x.site.source == node.site.source or makes_integers(x.site)]
    # Of several of one kind on a line, as log(p) and log(1 - p), the first is named.
    ends = ((each.rounding if each.site.name == node.site.name else each).site.eqn for each in found)
    return next((f"it reads {each.text}" for each, end in zip(found, ends, strict=True) if id(end) in before), "")


def is_half_over_sqrt(flow: Flow, node: Node) -> bool:
    """Whether an equation is 0.5 / sqrt(x), the derivative of a square root."""
    if node.site.name != "div" or node.reads[0].constant is None or np.any(node.reads[0].constant != 0.5):
        return False
    maker = flow.maker(node.reads[1])
    return maker is not None and maker.site.name == "sqrt"


def is_selected(flow: Flow, value: Value) -> bool:
    """Whether a cotangent is one of a `where`, up to factors: zero where the other branch was selected."""

    def through(node: Node) -> Iterable[Value]:
        row = primitive(node.site.name)
        return node.reads if node.site.phase == BACKWARD and (row.moves or row.scales or row.adds) else ()

    return any(node.site.name == "select_n" for node in flow.made_by([value], through))
