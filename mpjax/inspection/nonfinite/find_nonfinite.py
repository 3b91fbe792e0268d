"""`find_nonfinite`: the first operation that makes an inf or NaN that reaches a result."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.inspection.auditing.constants import as_written, in_float32
from mpjax.inspection.nonfinite import diagnosis
from mpjax.inspection.nonfinite.diagnosis import Symptoms, diagnosis_of
from mpjax.inspection.nonfinite.examined import Examined, first_that_reaches, is_number
from mpjax.inspection.nonfinite.provenance import MADE
from mpjax.inspection.reports import Report, Section, array_text
from mpjax.inspection.trials import trace_to_run
from mpjax.policy import HALF_DTYPES
from mpjax.program import compat
from mpjax.program.dtypes import is_half, is_inexact
from mpjax.program.graph import Site, walk
from mpjax.program.source import BACKWARD, FORWARD, apart
from mpjax.program.tracing import TracedCall


def find_nonfinite(fun: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None) -> NonFinite | None:
    """Finds the first operation that made an inf or NaN from finite inputs, in the forward or the backward pass.

    Traces `fun` and runs its program operation by operation, each as written, which takes less time than compiling it.
    Each result gets a code: finite, inf or NaN. The codes give the source of each value that is not finite:

        result is finite                 none (softmax or a `where` removed a masked -inf)
        an operand is not finite         the source of that operand
        otherwise                        this operation

    A fault is reported only if it reaches a result of `fun` or a check for finite values (`jnp.isfinite(x).all()`,
    including the check that lets mpjax skip a step), or if a conversion to integers hides it, and a result depends on
    the integers (indices, counts). Infinities that the program itself writes, or that are in an argument, are not
    faults while they are only moved, masked, compared and added. They are reported if they reach a scalar result or a
    check, or make a NaN: the argument, or, if it holds -inf alone as a mask does, the operation that makes the NaN,
    with the argument. Further runs find the element that reaches the result, measure the ranges there and evaluate the
    same point in float32. No tensor is copied to the host.

    Args:
        fun: Any function of arrays or pytrees: a loss function, `mpjax.value_and_grad(loss_fn, opt_state)`, a train
            step, jitted or not. NNX objects in its arguments are left unchanged.
        args: Its arguments: arrays with any sharding.
        kwargs: Its keyword arguments.

    Returns:
        The fault, or None if there is none.

    Raises:
        TypeError: An argument is a shape without values, or the call is inside `jit`.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> x = jnp.array([[1.0, 2.0], [300.0, 4.0]], jnp.float16)
        >>> found = mpjax.find_nonfinite(lambda x: jnp.sum(x * x, axis=1), x)
        >>> found.primitive, found.kind, found.element
        ('mul', 'inf', (1, 0))
        >>> found.diagnosis
        'overflow of float16 here (float32 value 90,000)'

    Source: the per-operation checks of `tf.debugging.enable_check_numerics` (TensorFlow) and `jax_debug_nans`.
    """
    kwargs = dict(kwargs or {})
    traced = trace_to_run("find_nonfinite", fun, args, kwargs)
    causes = [*itertools.islice(_causes(first := Examined(traced)), _MOST)]
    if not causes:
        return None
    # The value before its derivative: a division by zero before that of a square root of zero.
    causes.sort(key=lambda cause: cause.fault.rank == MADE and cause.is_derivative(cause.fault.number))
    causes = [each for i, each in enumerate(causes) if not any(one.explains(each.fault) for one in causes[:i])]
    program = causes[0]
    written = functools.cache(functools.partial(as_written, fun, args, kwargs))
    fine = functools.cache(functools.partial(_float32_is_fine, fun, args, kwargs))
    found, *others = (
        _in_argument(cause, cause.fault.number)
        if cause.fault.is_argument
        else _examined(cause, cause is program, fine, written)
        for cause in causes
    )
    # Another source may be the reason why an earlier result is not finite.
    ends = zip(_result_names(traced), first.replay.results, strict=True)
    bad = [(end.place != program.fault.place, name) for name, end in ends if end]
    result = None if program.fault.is_argument else min(bad, default=(0, None), key=lambda pair: pair[0])[1]
    place, *places = (None if each.fault.is_argument else each.places[each.fault.number] for each in causes)
    sources = (f"{other.source}{apart(where, place)}" for other, where in zip(others, places, strict=True))
    lines = (dataclasses.replace(other, source=where).line for other, where in zip(others, sources, strict=True))
    hidden = (
        f"; the conversion to {each.outvars[0].aval.dtype.name} at {each.source} hides it"
        for each in program.replay.converted.get(program.fault, ())
    )
    found = dataclasses.replace(found, diagnosis=found.diagnosis + next(hidden, ""))
    return dataclasses.replace(found, result=result, others=tuple(dict.fromkeys((found.line, *lines)))[1:])


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

    heading = "{0._what} found"

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
        others = [f"  another cause: {other}" for other in self.others]
        if self.argument is not None:
            return [Section("", "\n".join([f"{self._what} in {self.argument}: {self.diagnosis}", *others]))]
        lines = [
            f"{self._made}, module {self.module or '-'}, {self.direction} pass{self._turn}",
            f"  {self.diagnosis}",
            *others,
            f"  output {self.output}: {self.count} inf or NaN, the first that reaches the result is {self.element}"
            + (f" of device {self.device}" if self.device else ""),
        ]
        lines += [f"  {self.result} is not finite"] if self.result not in (None, "result") else []
        lines += [f"  input {i}: {operand}" for i, operand in enumerate(self.inputs)]
        lines += [f"  not inspected: {place}" for place in self.unseen]
        return [Section("", "\n".join(lines))]


_MOST = 3  # causes that are reported


def _causes(program: Examined) -> Iterator[Examined]:
    """The program with its first fault; then with the first that is left if the elements of that are finite."""
    while program.found is not None:
        yield program
        program = program.without


def _result_names(program: TracedCall) -> list[str]:
    """The tree paths of a program's results, as `result[0]['w']`."""
    marks = [object() for _ in compat.open_jaxpr(program.jaxpr).jaxpr.outvars]
    leaves = jax.tree_util.tree_leaves_with_path(program.rebuild(marks))
    return [f"result{jax.tree_util.keystr(path)}" for path, leaf in leaves if leaf in marks]


def _float32_is_fine(fun: Callable[..., Any], args: Any, kwargs: Any) -> bool | None:
    """Whether the function is finite when it is traced with float32 in place of half arguments, and without autocast.

    The function is traced again because tracing rounds a constant that meets half arrays, and because opaque operations
    keep their half dtypes in a widened program. None if unknown: the function still computes in half.
    """
    try:
        traced = in_float32(fun, args, kwargs)
        if Examined(traced).found is None:
            return True
    except Exception:  # The function may require half arguments.
        return None
    halves = (is_half(v) for site in walk(traced.jaxpr) for v in (*site.eqn.invars, *site.eqn.outvars))
    return None if any(halves) else False


def _examined(
    program: Examined, first: bool, float32_is_fine: Callable[[], bool | None], original: Callable[[], TracedCall]
) -> NonFinite:
    """The report of a fault: the ranges at its point, and the same point in float32.

    The functions say whether the call is finite in float32, and trace it with constants as written. Of the first fault,
    the element is sought that reaches a result.
    """
    fault, block, flow = program.fault, program.block, program.flow
    place = program.places[fault.number]
    axes, eqn = dict(place.axes), place.eqn
    size = max(v.aval.size for v in eqn.outvars if is_inexact(v))
    _, here = program.point(fault)
    if first and not fault.is_constant and (here["count"] > 1 or axes):
        _, index, device = map(int, here["index"])
        position = first_that_reaches(program, device * size + index, size * math.prod(axes.values()))
        if position != device * size + index:
            _, here = program.point(fault, tuple(map(np.int32, (0, position % size, position // size))))
    around = (v for e in (eqn, *(place.eqn for place in block.places())) for v in (*e.outvars, *e.invars))
    half = next((v.aval.dtype.name for v in around if is_half(v)), None)
    # Without half, the float32 run is the same program.
    reached, there = program.point(fault, tuple(here["index"]), wide=True) if half else (True, here)
    which, index, device = map(int, here["index"])
    out = [v.aval for v in eqn.outvars if is_inexact(v)][which]
    node = program.nodes[fault.number]
    derivative = program.is_derivative(fault.number)
    element = tuple(map(int, np.unravel_index(index, out.shape)))
    value = float(there["value"]) if reached else None
    kind = "nan" if np.isnan(here["value"]) else "inf"
    fine = math.isfinite(here["float32"] if value is None else value)
    operands = tuple(map(float, here["operands"]))
    overflows = diagnosis.overflows(place.name, operands, kind)
    cast = diagnosis.cast_input(flow, node)
    argument = "" if cast is None else program.name_of(cast)
    mask = program.replay.from_masks.get(fault)
    held = "" if mask is None else f" ({program.name_of(mask)} held -inf before the call)"
    constants, doubtful = ([], "") if overflows else diagnosis.constants_lost(flow, node, original, not fine)
    if constants and not math.isfinite(program.point(fault, tuple(here["index"]), held=constants)[1]["value"]):
        constants = []  # A constant that half holds changes nothing.
    outside = (abs(float(np.ravel(c)[0])) for c in block.consts if is_half(c) and np.size(c) == 1)
    before = {id(each.site.eqn) for each in flow.before(node.reads)}
    earlier = (program.places[n] for n in sorted({when[-1] for when in program.replay.made}))
    behind = next((each for each in earlier if id(each.eqn) in before), None)
    symptoms = Symptoms(
        flow=flow,
        node=node,
        ranges=here["ranges"],
        kind=kind,
        half=half,
        operands=operands,
        operands32=tuple(map(float, there["operands"])) if reached else (),
        local=float(here["float32"]),
        float32=value,
        backward=not argument and (derivative or place.phase == BACKWARD or _was_finite(program, place)),
        argument=argument,
        derivative=derivative,
        float8=out.dtype.name if out.dtype.name.startswith("float8") else "",
        constant=fault.is_constant,
        constants=constants,
        doubtful=doubtful or ("a constant" if not overflows and any(c in (0, 1) for c in outside) else ""),
        where_gradient=_is_where_gradient(program),
        behind="" if behind is None else f"an inf or NaN made by {behind.name} at {behind.source}",
        float32_is_fine=float32_is_fine,
    )
    numbers = [v.aval for v in eqn.invars if is_number(v)]
    iteration, where = fault.indices(program.places), map(int, np.unravel_index(device, tuple(axes.values())))
    return NonFinite(
        primitive=place.name,
        module=place.path,
        source=place.line,
        kind=symptoms.kind,
        diagnosis=diagnosis_of(symptoms) + held,
        direction="backward" if symptoms.backward or (symptoms.where_gradient and not fine) else "forward",
        iteration=iteration[0] if len(iteration) == 1 else iteration or None,
        iterations=sum(when[-1] == fault.number for when in program.replay.made),
        inputs=tuple(
            OperandRange(str(aval.dtype), aval.shape, float(found[0]), float(found[1]), float(found[2]), int(found[3]))
            for aval, found in zip(numbers, here["ranges"], strict=True)
        ),
        output=array_text(out),
        count=int(here["count"]),
        element=element,
        float32_value=value,
        device=", ".join(f"{axis}={i}" for axis, i in zip(axes, where, strict=True)) or None,
        unseen=block.not_entered(),
    )


def _was_finite(program: Examined, place: Site) -> bool:
    """Whether a recomputed equation repeats one of the forward pass, which was finite there."""
    key = place.name, place.source, place.path
    forward = (other for other in program.places.values() if other.phase == FORWARD and place.phase != FORWARD)
    copies = {other.number for other in forward if (other.name, other.source, other.path) == key}
    return bool(copies) and copies.isdisjoint(when[-1] for when in program.replay.made)


def _is_where_gradient(program: Examined) -> bool:
    """Whether a fault in the differentiated forward pass only matters because of the zero gradient of a `where`."""
    flow, fault, place = program.flow, program.fault, program.places[program.fault.number]
    replay, entry = program.replay, program.replay.entries.get(fault)
    if entry is None or fault in replay.passed_on or (place.phase == FORWARD and "jvp(" not in place.module):
        return False
    makers = [flow.maker(v) for v, code in zip(flow.outputs, replay.codes, strict=True) if code]
    if any(maker is None or maker.site.phase != BACKWARD for maker in makers):
        return False
    operands = zip(program.point(entry)[1]["operands"], program.nodes[entry.number].reads, strict=True)
    return any(diagnosis.is_selected(flow, v) for value, v in operands if value == 0)


def _in_argument(program: Examined, index: int) -> NonFinite:
    """The report of a fault in an argument: the leaf, the number of elements and the index of the first."""
    array = jnp.asarray(program.leaves[index])
    bad = ~jnp.isfinite(array).ravel()
    first, count = int(jnp.argmax(bad)), int(jnp.sum(bad))
    element = tuple(map(int, np.unravel_index(first, array.shape)))
    half = f" (it is {array.dtype}: it may have overflowed when it was cast)" if array.dtype in HALF_DTYPES else ""
    return NonFinite(
        primitive="argument",
        module="",
        source="",
        kind="nan" if jnp.isnan(array.ravel()[first]) else "inf",
        diagnosis=f"{count:,} of {array.size:,} elements were inf or NaN before the call, first at {element}{half}: "
        "check what computed it (an earlier step that was not skipped), or the data",
        output=array_text(array),
        count=count,
        element=element,
        argument=program.name_of(index),
    )
