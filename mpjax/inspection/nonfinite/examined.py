"""A program that is searched for faults: run as it is, without some of its faults, and at one point."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from mpjax.inspection.auditing.amplified import makes_integers
from mpjax.inspection.auditing.constants import Lost
from mpjax.inspection.nonfinite.diagnosis import is_half_over_sqrt
from mpjax.inspection.nonfinite.provenance import CodeProbe, Provenance, Replay, TripProbe, code_of, code_of_argument
from mpjax.inspection.trials import argument_name
from mpjax.program import compat
from mpjax.program.dtypes import is_inexact, widened
from mpjax.program.graph import Site, lay_out
from mpjax.program.host import in_host_memory
from mpjax.program.inlining import Flow, Node, Value, flow_of
from mpjax.program.interpreter import Arrays, Eager, Instrumented, Key, Notes, Probe, bound
from mpjax.program.owners import owners_of
from mpjax.program.primitives import MATMULS, primitive
from mpjax.program.source import BACKWARD, FORWARD, apart
from mpjax.program.tracing import TracedCall

# By name: the derivative of a power is a power.


class Examined:
    """A program laid out. Its leaves are its arguments, followed by the arrays that it closes over.

    Attributes:
        replay: What led to its results, once its fault was searched.
        finite: The numbers of the equations whose elements are made finite, because their fault is known.
        finite_leaves: The same of leaves.
        kept: The last fault that was made finite.
        compiled: The loops that the first search compiled, by number.
        most: The trip count of each `while` with the faults, after which it ends without them.
    """

    def __init__(self, traced: TracedCall):
        owners = owners_of(traced.jaxpr, traced.names)
        self.block, self.flow = lay_out(traced.jaxpr, owners=owners), flow_of(traced.jaxpr, owners)
        self.names, self.leaves = traced.names, [*traced.arrays, *self.block.consts]
        self.places = {place.number: place for place in self.block.places()}
        self.finite: frozenset[int] = frozenset()
        self.finite_leaves: frozenset[int] = frozenset()
        self.kept: Provenance | None = None
        self.compiled: Mapping[int, Callable[..., Any]] = {}
        self.most: dict[int, int] = {}
        self.replay: Replay
        self.evaluated: Eager
        if (probe := TripProbe(self.places.values())).noted:
            notes = self.run(self.evaluation(probe), self.leaves)[1]
            self.most = {number: int(trips) for (_, number), trips in jax.device_get(notes).items()}

    @functools.cached_property
    def found(self) -> Provenance | None:
        """The first fault. Without faults that are known, one that does not depend on the numbers that replace them."""
        self.evaluated = self.evaluation(CodeProbe(self.places))
        self.evaluated.known = self.known()
        self.replay = self.replayed()
        self.compiled, fault = self.compiled or self.evaluated.compiled, self.replay.fault
        if fault is None and not self.is_repaired and self.replay.converted:
            return self._hidden
        return None if fault is not None and self.is_repaired and self.replayed(seed=1).fault != fault else fault

    @property
    def _hidden(self) -> Provenance | None:
        """The first fault that a conversion to integers hides, if a result depends on the integers that are made."""

        def results(changed: int) -> list[Any]:
            evaluation = self.evaluation(Probe())
            evaluation.replace = Partial(_integers_changed, np.int32(changed))
            return self.run(evaluation, self.leaves)[0]

        pairs = zip(*map(results, (0, 1)), strict=True)
        depends = any(is_number(x) and not jnp.array_equal(x, y, equal_nan=is_inexact(x)) for x, y in pairs)
        return min(self.replay.converted) if depends else None

    @property
    def fault(self) -> Provenance:
        """The first fault of a program that has one."""
        assert self.found is not None
        return self.found

    @functools.cached_property
    def without(self) -> Examined:
        """The program without its fault: other numbers replace the elements that are not finite."""
        program, fault = copy.copy(self), self.fault
        for name in ("found", "without"):
            program.__dict__.pop(name, None)
        if fault.is_argument:
            program.finite_leaves |= {fault.number}
        else:
            gone, program.kept = self._repeated(fault), fault
            program.finite = self.finite.union(gone, (n for n in self.places if self._follows(n, gone)))
        return program

    @property
    def is_repaired(self) -> bool:
        """Whether some of its faults are known, and replaced."""
        return bool(self.finite or self.finite_leaves)

    def explains(self, other: Provenance) -> bool:
        """Whether another fault is only the derivative of this one."""
        if self.fault.is_argument or other.is_argument:
            return False
        one, two = self.places[self.fault.number], self.places[other.number]
        # In the loop of the backward pass, the operand of a derivative is an array of all iterations.
        alike = self.fault.indices(self.places) == other.indices(self.places) != () and one.source == two.source
        return (alike and two.phase == BACKWARD) or self._follows(other.number, [self.fault.number])

    def _follows(self, number: int, faults: Collection[int]) -> bool:
        """Whether an equation computes the derivative of one of some faults, on its line."""
        place = self.places[number]
        firsts = [self.nodes[n] for n in faults if self.places[n].source == place.source and n != number]
        if not firsts or place.blocks or not (place.phase == BACKWARD or self.is_derivative(number)):
            return False
        of = {self.same.get(v, v) for first in firsts for v in (*first.reads, *first.writes)}
        return not of.isdisjoint(self.same.get(v, v) for v in self.nodes[number].reads)

    def _repeated(self, fault: Provenance) -> set[int]:
        """The equation of a fault, those of the same call (in a recomputation, in layers), and those that read it."""
        here, writes = self.places[fault.number], self.nodes[fault.number].writes
        derivative = self.is_derivative(fault.number)

        def is_repeated(n: int) -> bool:
            place = self.places[n]
            if (place.name, place.source, place.phase == BACKWARD) != (here.name, here.source, here.phase == BACKWARD):
                return False
            depends = any(self.flow.depends(self.nodes[n].reads, v) for v in writes)
            return (depends or not apart(place, here)) and self.is_derivative(n) == derivative

        return {fault.number, *filter(is_repeated, self.places)}

    @functools.cached_property
    def same(self) -> dict[Value, Value]:
        """The first of the values that the same operations of the same lines make of the same values.

        A recomputation makes the same.
        """
        found, same = dict[Any, Value](), dict[Value, Value]()

        def key(v: Value) -> Any:
            return same.get(v, v) if v.constant is None else str(v.constant) if np.size(v.constant) == 1 else v

        for node in self.flow.eqns:
            same |= {v: v.whole for v in node.reads if v.whole is not None}
            operation = node.site.name, node.site.source, *map(key, node.reads)
            same |= {v: found.setdefault((i, *operation), v) for i, v in enumerate(node.writes)}
        return same

    def is_derivative(self, number: int) -> bool:
        """Whether an equation of the forward pass, or of its recomputation, only computes a derivative."""
        node = self.nodes[number]
        if node.site.phase == FORWARD:
            return id(node.site.eqn) not in self.primal
        is_power = node.site.name in ("pow", "integer_pow")  # of which the derivative is one too
        readers = [reader for v in node.writes for reader in self.flow.readers.get(v, ())]
        is_read_backward = all(each.site.phase == BACKWARD for each in readers)
        return is_half_over_sqrt(self.flow, node) or (is_power and is_read_backward)

    @functools.cached_property
    def nodes(self) -> dict[int, Node]:
        """The equations, by number."""
        nodes = iter(self.flow.eqns)  # which also has the insides of kernels, and inlines calls
        rows = {n: primitive(place.name) for n, place in self.places.items()}
        left = ((n, self.places[n].eqn) for n, row in rows.items() if not (row.call or row.shards))
        return {n: next(node for node in nodes if node.site.eqn is eqn) for n, eqn in left}

    @functools.cached_property
    def primal(self) -> set[int]:
        """The equations of the forward pass, by `id`, that compute the function's value and not only a derivative."""
        flow, found = self.flow, set[int]()

        def mark(level: Flow, live: set[Value]) -> None:
            # The value of a function of which only the gradient is used has no reader, or is not computed at all.
            def unread(v: Value) -> bool:
                return v not in flow.readers and v not in level.returned

            for node in reversed(level.nodes):
                # No derivative of an elementwise operation has matmuls or reductions.
                computes = node.site.name in MATMULS or primitive(node.site.name).kernel
                is_value = not live.isdisjoint(node.writes) or all(map(unread, node.writes)) or computes
                if node.site.phase != BACKWARD and is_value:
                    found.add(id(node.site.eqn))
                    for inner in node.inner:
                        # The condition of a `while` returns something else.
                        writes = node.writes if len(node.writes) == len(inner.outputs) else inner.outputs
                        ends = zip(inner.outputs, writes, strict=True)
                        mark(inner, {end for end, v in ends if v in live or v is end or unread(v)})
                    live.update(node.reads)

        mark(flow, set(flow.outputs))
        return found

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

    def replayed(self, low: int = 0, high: int = 0, seed: float = 0) -> Replay:
        """The replay of a run.

        Args:
            low, high: The positions of the elements of `kept` that are kept.
            seed: Chooses the numbers in place of faults.
        """
        if (replace := self.evaluated.replace) is not None:
            self.evaluated.replace = Partial(replace.func, *_span(low, high, seed))
        leaves = self._leaves(seed)
        outs, notes = self.run(self.evaluated, leaves)
        codes, arguments, notes = jax.device_get((_codes(outs), _codes(leaves), notes))
        return Replay(self.block, list(map(code_of_argument, leaves, arguments)), codes, notes, self.is_repaired)

    def _leaves(self, seed: float = 0) -> list[Any]:
        return [finite(x, np.float32(seed)) if i in self.finite_leaves else x for i, x in enumerate(self.leaves)]

    def point(
        self, fault: Provenance, at: tuple[Any, ...] | None = None, wide: bool = False, held: Sequence[Lost] = ()
    ) -> tuple[bool, Any]:
        """Whether the point of a fault is reached, and what a `PointProbe` measures there.

        `held` are constants in whose place are numbers that their dtypes hold.
        """
        probe = PointProbe(self.places[fault.number], fault.iteration, at, wide)
        evaluation = self.evaluation(probe, wide, held)
        evaluation.known = {} if wide or held else self.known([fault.number])
        try:
            leaves = self._leaves()
            return jax.device_get(self.run(evaluation, [*map(widened, leaves)] if wide else leaves)[1][probe.noted[0]])
        except Reached as found:  # the rest of the program need not run
            return jax.device_get(found.args[0])

    def evaluation(self, probe: Probe, wide: bool = False, held: Sequence[Lost] = ()) -> Eager:
        """An evaluation with the elements of known faults made finite."""
        probe.most = self.most
        replace = replacing(probe, self.finite, self.kept, held)
        return Eager(probe, wide, Partial(replace, *_span(0, 0, 0)) if self.is_repaired or held else None)

    def known(self, excluded: Iterable[int] = ()) -> dict[int, Callable[..., Any]]:
        """The compiled loops in which no element is made finite, nor any of some equations is."""
        inside = {*self.finite, *excluded}
        return {n: run for n, run in self.compiled.items() if inside.isdisjoint(range(n, self.places[n].end))}


def first_that_reaches(program: Examined, first: int, positions: int) -> int:
    """The position of the first element of a fault that reaches a result by itself; `first` if none does.

    Args:
        program: The program.
        first: The position of its first element that is not finite.
        positions: The number of positions, over all devices.
    """
    without = program.without
    for _ in range(2):  # Other causes may hide what reaches a result.
        without = without if without.found is None else without.without
    made = {when[-1] for each in (program, program.without, without) for when in each.replay.made}
    if (without.kept, without.finite) != (program.fault, without.finite & made):
        without = copy.copy(without)  # What repeats the fault, and reads it, passes it on.
        without.kept, without.finite = program.fault, without.finite & made
        without.evaluated = without.evaluation(CodeProbe(without.places))
    none = None, without.replayed().fault

    def reaches(low: int, high: int) -> bool:
        return without.replayed(low, high).fault not in none

    if reaches(first, first + 1) or not reaches(0, positions):
        return first
    low, high = first, positions
    while high - low > 1:  # those before `high` reach it, those before `low` do not
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(0, middle) else (middle, high)
    return high - 1


def _span(low: int, high: int, seed: float) -> tuple[Any, ...]:
    return np.int32(low), np.int32(high), np.float32(seed)


def _codes(arrays: Sequence[Any]) -> list[Any]:
    return [code_of(jnp.asarray(x)) if is_inexact(x) else np.int32(0) for x in arrays]


def at_iteration(iteration: Sequence[Any], target: Sequence[int]) -> Any:
    """Whether the loops around an equation are at the target iteration."""
    hit: Any = np.bool_(True)
    for now, then in zip(iteration, target, strict=True):
        hit &= now == then
    return hit


def is_number(x: Any) -> bool:
    """Whether a value or a variable is an array of numbers: floats, indices, labels."""
    aval = getattr(x, "aval", None) or jax.typeof(x)
    return compat.is_shaped(aval) and jnp.issubdtype(aval.dtype, jnp.number)


class Reached(Exception):
    """Ends an evaluation at the target of a `PointProbe`; holds its note."""


class PointProbe(Probe):
    """Measures the ranges at one iteration of one equation.

    Args:
        target: The equation.
        iteration: The number of completed iterations of each enclosing loop, outermost first.
        element: The element to read, as (index of the result, flat index, device); None for the first that is not
            finite.
        wide: Whether the program runs in float32.
    """

    def __init__(self, target: Site, iteration: Sequence[int], element: Any, wide: bool):
        self.target, self.iteration, self.arrays, self.wide = target, iteration, element, wide
        self.noted = [("point", target.number)]

    def equation(self, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays, rerun: Callable[..., Any]) -> Notes:
        if place.number != self.target.number:
            return {}
        wide = outs if self.wide else rerun(list(map(widened, ins)))
        arrays, rest = [list(ins), list(outs), list(wide)], (self.arrays, self.device())
        leaves = jax.tree.leaves(arrays)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((leaves, rest))):
            return {self.noted[0]: (at_iteration(iteration, self.iteration), _measured(jnp, arrays, *rest))}
        if all(map(in_host_memory, leaves)):  # NumPy takes less time than compiling for these shapes.
            arrays = jax.tree.map(lambda x: np.asarray(x) if is_number(x) else x, arrays)
            raise Reached((True, _measured(np, arrays, *rest)))
        raise Reached((True, _compiled(arrays, *rest)))

    def passed(self, notes: Notes) -> None:
        if self.noted[0] in notes:
            raise Reached(notes[self.noted[0]])

    def empty(self, key: Key) -> Any:
        count, ranges = len(self.target.invars), sum(map(is_number, self.target.invars))
        numbers = {"index": jnp.zeros(3, jnp.int32), "count": jnp.int32(0), "value": jnp.float32(0)}
        nothing = {"chosen": jnp.array(False), "float32": jnp.float32(0), "operands": jnp.zeros(count, jnp.float32)}
        return jnp.array(False), {**numbers, **nothing, "ranges": [jnp.zeros(4, jnp.float32)] * ranges}

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        later = b[0] & ~(a[0] & a[1]["chosen"])  # the first device that has it
        return jax.tree.map(lambda x, y: jnp.where(later, y, x), a, b)


def replacing(
    probe: Probe, alike: Collection[int], fault: Provenance | None, held: Sequence[Lost]
) -> Callable[..., Sequence[Any]]:
    """The `replace` of an `Instrumented`, after a span of positions and a seed: makes some elements finite.

    These are the elements of some equations, but those of a fault inside of the span. The position of an element is its
    flat index, counted after the elements of all earlier devices. An array that several devices hold counts as that of
    the first of them.

    Args:
        probe: Knows the device.
        alike: The numbers of the equations.
        fault: The fault.
        held: Constants that were rounded, in whose place are numbers that their dtypes hold.
    """

    def replace(low: Any, high: Any, seed: Any, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays) -> Arrays:
        if constants := {lost.operand: lost.instead for lost in held if lost.site.eqn is place.eqn}:
            avals = [v.aval for v in place.invars]
            numbers = {i: jnp.full(avals[i].shape, float(number), avals[i].dtype) for i, number in constants.items()}
            outs = bound(place.eqn, [numbers.get(i, x) for i, x in enumerate(ins)], False)
        if place.number not in alike:
            return outs
        hit: Any = np.bool_(False)
        if fault is not None and place.number == fault.number:
            hit = at_iteration(iteration, fault.iteration)

        def finite_but_span(x: Any) -> Any:
            position = np.arange(x.size, dtype=np.int32).reshape(x.shape) + probe.device(x) * x.size
            return finite(x, seed, hit & (position >= low) & (position < high))

        return [finite_but_span(x) if is_inexact(x) else x for x in outs]

    return replace


def _integers_changed(changed: Any, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays) -> Arrays:
    """The results of an equation; by a bit others where an inf or NaN is converted to an integer."""
    if not makes_integers(place):
        return outs
    return [jnp.where(jnp.isfinite(ins[0]), outs[0], outs[0] ^ changed.astype(outs[0].dtype))]


def finite(x: Any, seed: Any, kept: Any = np.bool_(False)) -> Any:  # noqa: B008
    """An array with other numbers, from .5 to .9, in place of the elements that are not finite, except the kept.

    They differ from one another, and with the seed: what a program makes of equal numbers, or of 1, may be a fault.
    """
    numpy: Any = jnp
    if in_host_memory(x) and not isinstance(kept, jax.core.Tracer) and not isinstance(seed, jax.core.Tracer):
        numpy, x = np, np.asarray(x)
    place = np.arange(x.size, dtype=np.float32).reshape(x.shape)
    others = (0.5 + 0.4 * ((0.618 * place + 0.37 * seed) % 1)).astype(x.dtype)
    return numpy.where(~kept & ~numpy.isfinite(x), others, x)


def _measured(numpy: Any, arrays: Sequence[Arrays], element: Any, device: Any) -> dict[str, Any]:
    """The note of a `PointProbe`, by NumPy or `jax.numpy`, of an equation's operands, results, and float32 results."""
    ins, outs, wide = (list(map(compat.replicated, each)) for each in arrays)
    floats, floats32 = (list(filter(is_inexact, each)) for each in (outs, wide))
    bad = [~numpy.isfinite(x).ravel() for x in floats]
    counts = numpy.stack([numpy.sum(x, dtype=np.int32) for x in bad])
    which = numpy.argmax(counts > 0).astype(np.int32)
    index, device = numpy.stack([numpy.argmax(x).astype(np.int32) for x in bad])[which], numpy.asarray(device, np.int32)
    chosen = counts[which] > 0
    if element is not None:
        which, index, where = element
        chosen = device == where
    return {
        "chosen": chosen,
        "index": numpy.stack([which, index, device]),
        "count": counts[which],
        "value": _at(numpy, floats, which, index),
        "float32": _at(numpy, floats32, which, index),
        "operands": numpy.stack([_operand_at(numpy, x, floats[0].shape, index) for x in ins]),
        "ranges": [_range(numpy, x) for x in ins if is_number(x)],
    }


_compiled = jax.jit(functools.partial(_measured, jnp))


def _at(numpy: Any, arrays: Arrays, which: Any, index: Any) -> Any:
    """An element of one of several arrays, as a float32."""
    nan = np.float32(np.nan)
    values = [_real(numpy, x).ravel()[numpy.minimum(index, x.size - 1)] if x.size else nan for x in arrays]
    return numpy.stack(values)[which]


def _operand_at(numpy: Any, x: Any, shape: tuple[int, ...], index: Any) -> Any:
    """The element of an operand that an elementwise operation computes an element of its result from; else NaN."""
    nan = np.float32(np.nan)
    if not compat.is_shaped(jax.typeof(x)) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
        return nan
    if np.ndim(x) == len(shape) > 0 and all(n in (1, size) for n, size in zip(np.shape(x), shape, strict=True)):
        return numpy.broadcast_to(_real(numpy, x), shape).ravel()[index]
    return _real(numpy, x) if np.ndim(x) == 0 else nan


def _real(numpy: Any, x: Any) -> Any:
    return numpy.real(x).astype(np.float32)


def _range(numpy: Any, x: Any) -> Any:
    """Minimum, maximum and smallest nonzero magnitude of the finite elements, and the number of other elements."""
    finite, x = numpy.isfinite(x), _real(numpy, x)
    size = numpy.where(finite & (x != 0), numpy.abs(x), np.inf)
    low = numpy.min(x, where=finite, initial=np.inf)
    high = numpy.max(x, where=finite, initial=-np.inf)
    return numpy.stack([low, high, numpy.min(size, initial=np.inf), numpy.sum(~finite).astype(np.float32)])
