"""`find_nonfinite`: the first operation that makes an inf or NaN that reaches a result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from mpjax.inspection.auditing.amplified import amplified
from mpjax.inspection.auditing.constants import Lost, are_unexplained, as_written, in_float32, lost_constants
from mpjax.inspection.nonfinite.point import PointProbe, Reached, finite_but, is_number
from mpjax.inspection.nonfinite.provenance import (
    MADE,
    CodeProbe,
    Provenance,
    Replay,
    WatchProbe,
    code_of,
    code_of_argument,
    first_fault,
    watched,
)
from mpjax.inspection.nonfinite.report import GROWING, OperandRange, Symptoms, diagnosis_of
from mpjax.inspection.nonfinite.report import NonFinite as NonFinite
from mpjax.inspection.reports import array_text
from mpjax.inspection.trials import argument_name, trace_to_run
from mpjax.policy import HALF_DTYPES
from mpjax.program import compat
from mpjax.program.dtypes import is_float, is_half, is_inexact, widened
from mpjax.program.graph import Block, Site, lay_out, walk
from mpjax.program.inlining import Flow, Node, flow_of
from mpjax.program.interpreter import Eager, Instrumented, Key
from mpjax.program.owners import owners_of
from mpjax.program.primitives import MATMULS, Op, primitive
from mpjax.program.source import BACKWARD, FORWARD
from mpjax.program.tracing import TracedCall

# By name: each of these gradients has a form.


def find_nonfinite(fun: Callable[..., Any], *args: Any, kwargs: Mapping[str, Any] | None = None) -> NonFinite | None:
    """Finds the first operation that made an inf or NaN from finite inputs, in the forward or the backward pass.

    Traces `fun` and runs its program operation by operation, each as written, which takes less time than compiling it.
    Each result gets a code: finite, inf or NaN. The codes give the source of each value that is not finite:

        result is finite                 none (softmax or a `where` removed a masked -inf)
        an operand is not finite         the source of that operand
        otherwise                        this operation

    A fault is reported only if it reaches a result of `fun` or a check for finite values (`jnp.isfinite(x).all()`,
    including the check that lets mpjax skip a step). Infinities that the program itself writes, or that are in an
    argument, are not faults while they are only moved, masked, compared and added. They are reported if they reach a
    scalar result or a check, or make a NaN: the argument, or, if it holds -inf alone as a mask does, the operation that
    makes the NaN, with the argument. Further runs find the element that reaches the result, measure the ranges
    there and evaluate the same point in float32. No tensor is copied to the host.

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
    program = _Examined(traced)
    fault = _search(program)
    if fault is None:
        return None
    # The value before its derivative: a division by zero before that of a square root of zero.
    program.fault = fault = min((fault, *program.replay.others(fault)), key=program.is_derivative)
    in_float32_, written = (functools.cache(functools.partial(f, fun, args, kwargs)) for f in (in_float32, as_written))
    found, *others = (
        _in_argument(program, each.number) if each.is_argument else _examined(program, each, in_float32_, written)
        for each in (fault, *program.others(fault))
    )
    # Another source may be the reason why an earlier result is not finite.
    bad = [(end != fault, name) for name, end in zip(_result_names(traced), program.replay.results, strict=True) if end]
    result = None if fault.is_argument else min(bad, default=(0, None), key=lambda pair: pair[0])[1]
    return dataclasses.replace(found, result=result, others=tuple(other.line for other in others))


_OTHERS = 2  # causes that are reported beside the first


def _result_names(program: TracedCall) -> list[str]:
    """The tree paths of a program's results, as `result[0]['w']`."""
    marks = [object() for _ in compat.open_jaxpr(program.jaxpr).jaxpr.outvars]
    leaves = jax.tree_util.tree_leaves_with_path(program.rebuild(marks))
    return [f"result{jax.tree_util.keystr(path)}" for path, leaf in leaves if leaf in marks]


Watched = tuple[bool, dict[int, int], Sequence[int]]  # one run: `watched`, and the codes of the results


class _Examined:
    """A program laid out. Its leaves are its arguments, followed by the arrays that it closes over."""

    def __init__(self, traced: TracedCall):
        owners = owners_of(traced.jaxpr, traced.names)
        self.block, self.flow = lay_out(traced.jaxpr, owners=owners), flow_of(traced.jaxpr, owners)
        self.names, self.leaves = traced.names, [*traced.arrays, *self.block.consts]
        self.places = {place.number: place for place in self.block.places()}
        self.fault: Provenance | None = None
        self.codes: Sequence[int] = ()  # of the results
        self.replay: Replay
        self.watched = functools.cache(self._watched)
        self._evaluation: Eager | None = None

    def others(self, fault: Provenance) -> list[Provenance]:
        """Other causes, of other lines; none in loops, which measuring it would compile again."""
        causes = [each for each in self.replay.others(fault) if each.is_argument or not each.iteration]
        by_line = {self._line(each): each for each in (*reversed(causes), fault)}
        return sorted({*by_line.values()} - {fault})[:_OTHERS]

    def is_derivative(self, fault: Provenance) -> bool:
        """Whether a source only computes a derivative in the forward pass."""
        is_one = lambda node: _is_derivative_of_sqrt(self.flow, node) or _is_derivative(self.flow, node)  # noqa: E731
        return fault.rank == MADE and is_one(self.node(fault))

    def node(self, fault: Provenance) -> Node:
        """The equation of a source."""
        place = self.places[fault.number]
        return next(node for node in self.flow.eqns if node.site.eqn is place.eqn and node.site.phase == place.phase)

    def _line(self, fault: Provenance) -> Any:
        place = self.places.get(fault.number)
        return fault if fault.is_argument or place is None else (place.name, place.source)

    def name_of(self, leaf: int) -> str:
        """The argument of a leaf, in words."""
        if leaf < len(self.names):
            return argument_name(self.names[leaf])
        array = jnp.asarray(self.leaves[leaf])
        return f"an array that the function closes over, {array.dtype}{list(array.shape)}"

    def run(self, evaluation: Instrumented, leaves: Sequence[Any]) -> tuple[list[Any], dict[Key, Any]]:
        """Evaluates the program."""
        count = len(self.names)
        return evaluation.block(self.block, leaves[:count], consts=leaves[count:])

    def point(self, fault: Provenance, at: tuple[Any, ...] | None = None, wide: bool = False) -> tuple[bool, Any]:
        """Whether the point of a fault is reached, and what a `PointProbe` measures there."""
        probe = PointProbe(self.places[fault.number], fault.iteration, at, wide)
        leaves = [*map(widened, self.leaves)] if wide else self.leaves
        try:
            return jax.device_get(self.run(Eager(probe, wide), leaves)[1][probe.noted[0]])
        except Reached as found:  # outside of loops, the rest of the program need not run
            return jax.device_get(found.args[0])

    def _watched(self, fault: Provenance | None = None, span: tuple[int, int] = (0, 0)) -> Watched:
        """Runs the program; with a fault, with its elements made finite except those in a span of positions."""
        if fault is None or self._evaluation is None:  # which compiles loops once
            replace = finite_but(probe := WatchProbe(), fault, self._alike(fault))
            self._evaluation = Eager(probe, replace=Partial(replace, None))
        evaluation = self._evaluation
        assert evaluation.replace is not None
        evaluation.replace = Partial(evaluation.replace.func, jax.tree.map(np.int32, span))
        outs, notes = self.run(evaluation, self.leaves)
        codes, notes = jax.device_get((_codes(outs), notes))
        return *watched(notes), codes

    def _alike(self, fault: Provenance | None) -> set[int]:
        """The equation of a fault, and the same operation of the same line in repeated layers."""
        if fault is None:
            return set()
        here = self.places[fault.number]
        return {n for n, p in self.places.items() if p.name == here.name and p.source == here.source}


def _search(program: _Examined) -> Provenance | None:
    """The first fault. A program without `while` runs only once."""
    has_while = any(place.name == "while" for place in program.places.values())
    trips = program.watched()[1] if has_while else {}
    outs, notes = program.run(Eager(CodeProbe(program.block, trips)), program.leaves)
    program.codes, arguments = jax.device_get((_codes(outs), _codes(program.leaves)))
    arguments = list(map(code_of_argument, program.leaves, arguments))
    program.fault, program.replay = first_fault(program.block, arguments, program.codes, jax.device_get(notes))
    return program.fault


def _first_that_reaches(program: _Examined, fault: Provenance, first: int, positions: int) -> int:
    """The position of the first element of a fault that reaches a result by itself; `first` if none does.

    Args:
        program: The program.
        fault: The fault.
        first: The position of its first element that is not finite.
        positions: The number of positions, over all devices.
    """
    failed_without, _, without = program.watched(fault, (0, 0))

    def reaches(low: int, high: int) -> bool:
        failed, _, codes = program.watched(fault, (low, high))
        return (failed and not failed_without) or any(c and not w for c, w in zip(codes, without, strict=True))

    if reaches(first, first + 1) or not reaches(0, positions):
        return first
    low, high = first, positions
    while high - low > 1:  # those before `high` reach it, those before `low` do not
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(0, middle) else (middle, high)
    return high - 1


def _codes(arrays: Sequence[Any]) -> list[Any]:
    return [code_of(jnp.asarray(x)) if is_inexact(x) else np.int32(0) for x in arrays]


def _float32_is_fine(original: Callable[[], TracedCall]) -> bool | None:
    """Whether the function is finite when it is traced with float32 in place of half arguments, and without autocast.

    The function is traced again because tracing rounds a constant that meets half arrays, and because opaque operations
    keep their half dtypes in a widened program. None if unknown: the function still computes in half.
    """
    try:
        traced = original()
        if _search(_Examined(traced)) is None:
            return True
    except Exception:  # The function may require half arguments.
        return None
    halves = (is_half(v) for site in walk(traced.jaxpr) for v in (*site.eqn.invars, *site.eqn.outvars))
    return None if any(halves) else False


def _examined(
    program: _Examined, fault: Provenance, in_float32: Callable[[], TracedCall], original: Callable[[], TracedCall]
) -> NonFinite:
    """The report of a fault: the ranges at its point, and the same point in float32.

    The functions trace the call in float32, and with constants as written.
    """
    place, block, flow = program.places[fault.number], program.block, program.flow
    axes, eqn = dict(place.axes), place.eqn
    size = max(v.aval.size for v in eqn.outvars if is_inexact(v))
    _, here = program.point(fault)
    if fault == program.fault and not fault.is_constant and here["count"] > 1:
        _, index, device = map(int, here["index"])
        first = device * size + index
        position = _first_that_reaches(program, fault, first, size * math.prod(axes.values()))
        if position != first:
            _, here = program.point(fault, tuple(map(np.int32, (0, position % size, position // size))))
    half = _half_name(block, eqn)
    # Without half, the float32 run is the same program.
    reached, there = program.point(fault, tuple(here["index"]), wide=True) if half else (True, here)
    which, index, device = map(int, here["index"])
    out = [v.aval for v in eqn.outvars if is_inexact(v)][which]
    node = program.node(fault)
    derivative = _is_derivative(flow, node)
    element = tuple(map(int, np.unravel_index(index, out.shape)))
    value = float(there["value"]) if reached else None
    kind = "nan" if np.isnan(here["value"]) else "inf"
    fine = math.isfinite(here["float32"] if value is None else value)
    overflows = kind == "inf" and place.name in GROWING
    argument = _cast_argument(program, node)
    mask = program.replay.from_masks.get(fault)
    held = "" if mask is None else f" ({program.name_of(mask)} held -inf before the call)"
    constants, doubtful = ([], False) if overflows else _lost_constants(program, node, original, not fine)
    evidence = Symptoms(
        primitive=place.name,
        kind=kind,
        half=half,
        half_here=is_half(eqn.outvars[0]) or any(map(is_half, eqn.invars)),
        operands=tuple(map(float, here["operands"])),
        operands32=tuple(map(float, there["operands"])) if reached else (),
        local=float(here["float32"]),
        float32=value,
        backward=not argument and (derivative or place.phase == BACKWARD or _was_finite(program, place)),
        argument=argument,
        derivative=derivative,
        of_sqrt=_is_derivative_of_sqrt(flow, node),
        float8=out.dtype.name if out.dtype.name.startswith("float8") else "",
        constant=fault.is_constant,
        opaque=primitive(place.name).op is Op.OPAQUE,
        constants=constants,
        doubtful=doubtful,
        rounding=_amplified_rounding(flow, place),
        index=_index_out_of_bounds(flow, node, here["ranges"]),
        where_gradient=_is_where_gradient(program, fault),
        float32_is_fine=functools.partial(_float32_is_fine, in_float32),
    )
    numbers = [v.aval for v in eqn.invars if is_number(v)]
    iteration, where = fault.indices(program.places), map(int, np.unravel_index(device, tuple(axes.values())))
    return NonFinite(
        primitive=place.name,
        module=place.path,
        source=place.line,
        kind=evidence.kind,
        diagnosis=diagnosis_of(evidence) + held,
        direction="backward" if evidence.backward or evidence.where_gradient else "forward",
        iteration=iteration[0] if len(iteration) == 1 else iteration or None,
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


def _lost_constants(
    program: _Examined, node: Node, original: Callable[[], TracedCall], ones: bool
) -> tuple[list[Lost], bool]:
    """The constants that rounding made zero or inf; and whether others that the operation reads may be some.

    With `ones`, also those that became one and that the operation depends on, as 1 - 0.999 does.
    """
    flow, reached = program.flow, set(program.flow.reached(node.reads))
    nodes, line = [each for each in flow.eqns if not each.inner], node.site.source
    read = [each for each in flow.eqns if each is node or not reached.isdisjoint(each.writes)]
    here = {id(each.site.eqn) for each in (*read, *(each for each in nodes if each.site.source == line))}
    found = [lost for lost in lost_constants(nodes, original, is_float) if lost.written is not None]
    near = [lost for lost in found if id(lost.site.eqn) in here and (ones or abs(lost.value) != 1)]
    outside = (abs(float(np.ravel(c)[0])) for c in program.block.consts if is_half(c) and np.size(c) == 1)
    unexplained = are_unexplained(each.site for each in nodes if id(each.site.eqn) in here)
    return near or [lost for lost in found if abs(lost.value) != 1], any(c in (0, 1) for c in outside) or unexplained


def _index_out_of_bounds(flow: Flow, node: Node, ranges: Sequence[Any]) -> str:
    """The index with which a gather reads outside of an array, in words; empty if there is none."""
    eqn = node.site.eqn
    if node.site.name != "gather" or len(axes := eqn.params["dimension_numbers"].start_index_map) != 1:
        return ""
    size, (low, high, *_) = eqn.invars[0].aval.shape[axes[0]], ranges[1]
    last = size - eqn.params["slice_sizes"][axes[0]]
    bad = [int(i) for i in (high, low) if not 0 <= i <= last]
    # NumPy's indexing adds the size to a negative one.
    is_move = lambda each: each.site.name in ("reshape", "broadcast_in_dim", "convert_element_type")  # noqa: E731
    maker = flow.maker(flow.source(node.reads[1], is_move))
    added = size if maker is not None and maker.site.name == "select_n" and bad and bad[0] < 0 else 0
    return f"index {bad[0] - added} of an axis of {size}" if bad else ""


def _cast_argument(program: _Examined, node: Node) -> str:
    """The argument that an equation casts, in words; empty if it casts a computed value, or is no cast."""
    flow = program.flow
    if primitive(node.site.name).op is not Op.CONVERT:
        return ""
    source = flow.source(node.reads[0], lambda each: primitive(each.site.name).moves)
    return program.name_of(flow.inputs.index(source)) if source in flow.inputs else ""


def _amplified_rounding(flow: Flow, place: Site) -> str:
    """The rounding that an operation amplifies, in words; empty if there is none."""
    found = (each for each in amplified(flow)[0] if (each.site.name, each.site.source) == (place.name, place.source))
    return next((f"it reads {each.text}" for each in found), "")


def _is_derivative_of_sqrt(flow: Flow, node: Node) -> bool:
    """Whether an equation is 0.5 / sqrt(x), which the forward pass of a differentiated program computes."""
    if node.site.name != "div" or node.reads[0].constant is None or np.any(node.reads[0].constant != 0.5):
        return False
    maker = flow.maker(node.reads[1])
    return maker is not None and maker.site.name == "sqrt"


def _is_derivative(flow: Flow, node: Node) -> bool:
    """Whether an equation of the forward pass, or of its recomputation, only computes a derivative."""
    if node.site.phase == FORWARD:
        return id(node.site.eqn) not in _primal(flow)
    is_power = node.site.name in ("pow", "integer_pow")  # of which the derivative is one too
    readers = [reader for v in node.writes for reader in flow.readers.get(v, ())]
    return _is_derivative_of_sqrt(flow, node) or (is_power and all(each.site.phase == BACKWARD for each in readers))


def _was_finite(program: _Examined, place: Site) -> bool:
    """Whether a recomputed equation repeats one of the forward pass, which was finite there."""
    key = place.name, place.source, place.path
    forward = (other for other in program.places.values() if other.phase == FORWARD and place.phase != FORWARD)
    copies = {other.number for other in forward if (other.name, other.source, other.path) == key}
    return bool(copies) and copies.isdisjoint(program.replay.made)


def _primal(flow: Flow) -> set[int]:
    """The equations of the forward pass, by `id`, that compute the function's value and not only a derivative."""
    found, live = set[int](), set(flow.outputs)
    for node in reversed(flow.nodes):
        # The value of a function of which only the gradient is used has no reader, or is not computed at all.
        is_read = any(v in flow.readers or v in flow.returned for v in node.writes)
        # No derivative of an elementwise operation has matmuls or reductions.
        computes = node.site.name in MATMULS or primitive(node.site.name).kernel
        is_value = not live.isdisjoint(node.writes) or not is_read or computes
        if node.site.phase != BACKWARD and is_value:
            found.update(id(each.site.eqn) for each in (node, *node.inside))
            live.update(node.reads)
    return found


def _is_where_gradient(program: _Examined, fault: Provenance) -> bool:
    """Whether a fault in the differentiated forward pass only matters because of the zero gradient of a `where`."""
    flow, place, entry = program.flow, program.places[fault.number], program.replay.entry(fault)
    if entry is None or (place.phase == FORWARD and "jvp(" not in place.module):
        return False
    makers = [flow.maker(v) for v, code in zip(flow.outputs, program.codes, strict=True) if code]
    are_gradients = all(maker is not None and maker.site.phase == BACKWARD for maker in makers)
    selects = any(node.site.name == "select_n" and node.site.phase == BACKWARD for node in flow.eqns)
    return selects and are_gradients and 0 in program.point(entry)[1]["operands"]


def _half_name(block: Block, eqn: Any) -> str | None:
    """The half dtype of an equation, or else of the program."""
    eqns = (eqn, *(place.eqn for place in block.places()))
    return next((v.aval.dtype.name for e in eqns for v in (*e.outvars, *e.invars) if is_half(v)), None)


def _in_argument(program: _Examined, index: int) -> NonFinite:
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
