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

from mpjax.inspection.auditing.constants import Lost
from mpjax.inspection.nonfinite.evidence import is_derivative, primal
from mpjax.inspection.nonfinite.point import PointProbe, Reached, finite, finite_but, with_constants
from mpjax.inspection.nonfinite.provenance import (
    CodeProbe,
    Provenance,
    Replay,
    WatchProbe,
    code_of,
    code_of_argument,
    first_fault,
    watched,
)
from mpjax.inspection.trials import argument_name
from mpjax.program.dtypes import is_inexact, widened
from mpjax.program.graph import lay_out
from mpjax.program.inlining import Node, Value, flow_of
from mpjax.program.interpreter import Eager, Instrumented, Key, Probe
from mpjax.program.owners import owners_of
from mpjax.program.primitives import primitive
from mpjax.program.source import BACKWARD
from mpjax.program.tracing import TracedCall

# By name: a `while` may end at a NaN.

_NO_SPAN = np.int32(0), np.int32(0)
Watched = tuple[bool, dict[int, int], Sequence[int]]  # one run: `watched`, and the codes of the results


class Examined:
    """A program laid out. Its leaves are its arguments, followed by the arrays that it closes over.

    Attributes:
        fault: The first fault, once it was searched.
        codes: The codes of its results.
        replay: What led to them.
        finite: The numbers of the equations whose elements are made finite, because their fault is known.
        finite_leaves: The same of leaves.
        compiled: The loops that its first search compiled, by number.
        most: The trip count of each `while` with the faults, after which it ends without them; None before a repair.
    """

    def __init__(self, traced: TracedCall):
        owners = owners_of(traced.jaxpr, traced.names)
        self.block, self.flow = lay_out(traced.jaxpr, owners=owners), flow_of(traced.jaxpr, owners)
        self.names, self.leaves = traced.names, [*traced.arrays, *self.block.consts]
        self.places = {place.number: place for place in self.block.places()}
        self.whiles = [place for place in self.places.values() if place.name == "while"]
        self.finite: frozenset[int] = frozenset()
        self.finite_leaves: frozenset[int] = frozenset()
        self.most: dict[int, int] | None = None
        self.compiled: Mapping[int, Callable[..., Any]] = {}
        self.fault: Provenance
        self.codes: Sequence[int] = ()  # of the results
        self.replay: Replay
        self._start()

    def _start(self) -> None:
        self.watched = functools.cache(self._watched)
        self._evaluation: Eager | None = None

    def trips(self) -> dict[int, int]:
        """The trip count of each `while`."""
        if self.most is None:
            self.most = self.watched()[1] if self.whiles else {}
        return self.most

    def repaired(self) -> Examined:
        """The program without its fault: other numbers replace the elements that are not finite."""
        program, fault = copy.copy(self), self.fault
        if fault.is_argument:
            program.finite_leaves |= {fault.number}
        else:
            gone = self._repeated(fault)
            program.finite = self.finite.union(gone, (n for n in self.places if self._follows(n, gone)))
        program._start()
        return program

    def explains(self, other: Provenance) -> bool:
        """Whether another fault only follows from this one, on the same line."""
        if self.fault.is_argument or other.is_argument:
            return False
        one, two = self.places[self.fault.number], self.places[other.number]
        if one.source != two.source:
            return False
        reads, writes = self.nodes[other.number].reads, self.nodes[self.fault.number].writes
        depends = one.phase == two.phase and any(self.flow.depends(reads, v) for v in writes)
        # In the loop of the backward pass, the operand of a derivative is an array of all iterations.
        in_loop = self.fault.indices(self.places) == other.indices(self.places) != ()
        return depends or (in_loop and two.phase == BACKWARD) or self._follows(other.number, [self.fault.number])

    def _follows(self, number: int, faults: Collection[int]) -> bool:
        """Whether an equation computes the derivative of one of some faults, on its line."""
        place = self.places[number]
        firsts = [self.nodes[n] for n in faults if self.places[n].source == place.source and n != number]
        if not firsts or place.blocks or not (place.phase == BACKWARD or self.is_derivative(number)):
            return False
        of = {self.first.get(v, v) for first in firsts for v in (*first.reads, *first.writes)}
        return not of.isdisjoint(self.first.get(v, v) for v in self.nodes[number].reads)

    @functools.cached_property
    def first(self) -> dict[Value, Value]:
        """The first of the values that the same operations of the same lines make of the same values.

        A recomputation makes the same.
        """
        found, first = dict[Any, Value](), dict[Value, Value]()
        for node in self.flow.eqns:
            first |= {v: v.whole for v in node.reads if v.whole is not None}
            reads = tuple(str(v.constant) if np.size(v.constant) == 1 else first.get(v, v) for v in node.reads)
            for i, v in enumerate(node.writes):
                first[v] = found.setdefault((node.site.name, node.site.source, reads, i), v)
        return first

    def is_derivative(self, number: int) -> bool:
        """Whether an equation of the forward pass, or of its recomputation, only computes a derivative."""
        return is_derivative(self.flow, self.nodes[number], self.primal)

    @functools.cached_property
    def nodes(self) -> dict[int, Node]:
        """The equations, by number."""
        nodes = iter(self.flow.eqns)  # which also has the insides of kernels, and inlines calls
        rows = {n: primitive(place.name) for n, place in self.places.items()}
        left = ((n, self.places[n].eqn) for n, row in rows.items() if not (row.call or row.shards))
        return {n: next(node for node in nodes if node.site.eqn is eqn) for n, eqn in left}

    @property
    def is_repaired(self) -> bool:
        """Whether some of its faults are known, and replaced."""
        return bool(self.finite or self.finite_leaves)

    @functools.cached_property
    def primal(self) -> set[int]:
        """The equations that compute the function's value: see `evidence.primal`."""
        return primal(self.flow)

    def name_of(self, leaf: int) -> str:
        """The argument of a leaf, in words."""
        if leaf < len(self.names):
            return argument_name(self.names[leaf])
        array = jnp.asarray(self.leaves[leaf])
        return f"an array that the function closes over, {array.dtype}{list(array.shape)}"

    def run(self, evaluation: Instrumented, leaves: Sequence[Any]) -> tuple[list[Any], dict[Key, Any]]:
        """Evaluates the program."""
        count, leaves = len(self.names), self.leaves_of(evaluation, leaves)
        return evaluation.block(self.block, leaves[:count], consts=leaves[count:])

    def leaves_of(self, evaluation: Instrumented, leaves: Sequence[Any] = ()) -> Sequence[Any]:
        """Its leaves, or others, without their faults."""
        seed = evaluation.replace.args[-1] if evaluation.replace else 0
        return [finite(x, seed) if i in self.finite_leaves else x for i, x in enumerate(leaves or self.leaves)]

    def point(
        self, fault: Provenance, at: tuple[Any, ...] | None = None, wide: bool = False, held: Sequence[Lost] = ()
    ) -> tuple[bool, Any]:
        """Whether the point of a fault is reached, and what a `PointProbe` measures there.

        `held` are constants in whose place are numbers that their dtypes hold.
        """
        probe = PointProbe(self.places[fault.number], fault.iteration, at, wide)
        leaves = [*map(widened, self.leaves)] if wide else self.leaves
        try:
            evaluation = self.evaluation(probe, wide, held=held)
            evaluation.known = {} if wide or held else self.known([fault.number])
            return jax.device_get(self.run(evaluation, leaves)[1][probe.noted[0]])
        except Reached as found:  # the rest of the program need not run
            return jax.device_get(found.args[0])

    def _watched(self, fault: Provenance | None = None, span: tuple[int, int] = (0, 0)) -> Watched:
        """Runs the program; with a fault, with its elements made finite except those in a span of positions."""
        if fault is None or self._evaluation is None:  # which compiles loops once
            self._evaluation = self.evaluation(WatchProbe(), fault=fault)
        evaluation = self._evaluation
        if evaluation.replace is not None:
            evaluation.replace = Partial(evaluation.replace.func, *map(np.int32, span), np.float32(0))
        outs, notes = self.run(evaluation, self.leaves)
        codes, notes = jax.device_get((_codes(outs), notes))
        return *watched(notes), codes

    def evaluation(
        self, probe: Probe, wide: bool = False, fault: Provenance | None = None, held: Sequence[Lost] = ()
    ) -> Eager:
        """An evaluation with the elements of earlier faults, and of a fault, made finite."""
        alike = self.finite | (self._alike(fault) & {when[-1] for when in self.replay.made} if fault else set())
        probe.most = self.most or {}
        replace = with_constants(held, finite_but(probe, alike, fault))
        is_needed = alike or self.finite_leaves or held
        return Eager(probe, wide, Partial(replace, *_NO_SPAN, np.float32(0)) if is_needed else None)

    def known(self, excluded: Iterable[int] = ()) -> dict[int, Callable[..., Any]]:
        """The compiled loops in which no element is made finite, nor any of some equations is."""
        inside = {*self.finite, *excluded}
        return {n: run for n, run in self.compiled.items() if inside.isdisjoint(range(n, self.places[n].end))}

    def _repeated(self, fault: Provenance) -> set[int]:
        """The equation of a fault, its recomputation, and the same in layers that read its result."""
        writes, phase = self.nodes[fault.number].writes, self.places[fault.number].phase

        def is_repeated(n: int) -> bool:
            reads = self.nodes[n].reads
            return self.places[n].phase != phase or any(self.flow.depends(reads, v) for v in writes)

        return {n for n in self._alike(fault) if n == fault.number or is_repeated(n)}

    def _alike(self, fault: Provenance) -> set[int]:
        """The equation of a fault, and the same operation of the same line in repeated layers."""

        def kind(number: int) -> tuple[Any, ...]:
            place = self.places[number]
            return place.name, place.source, place.phase == BACKWARD

        first, derivative = kind(fault.number), self.is_derivative(fault.number)
        return {n for n in self.places if kind(n) == first and self.is_derivative(n) == derivative}


def search(program: Examined) -> Provenance | None:
    """The first fault. A program without `while` runs only once.

    Without faults that are known, only one is found that does not depend on the numbers that replace them.
    """
    evaluation = program.evaluation(CodeProbe(program.block, program.trips()))
    evaluation.known = program.known()
    fault = _first(program, evaluation)
    program.compiled = program.compiled or evaluation.compiled
    if fault is not None and program.is_repaired:
        evaluation.replace = evaluation.replace and Partial(evaluation.replace.func, *_NO_SPAN, np.float32(1))
        fault = fault if _first(program, evaluation) == fault else None
    if fault is not None:
        program.fault = fault
    return fault


def _first(program: Examined, evaluation: Eager) -> Provenance | None:
    leaves = program.leaves_of(evaluation)
    outs, notes = program.run(evaluation, program.leaves)
    program.codes, arguments = jax.device_get((_codes(outs), _codes(leaves)))
    codes = list(map(code_of_argument, leaves, arguments))
    fault, program.replay = first_fault(program.block, codes, program.codes, jax.device_get(notes), program.is_repaired)
    return fault


def first_that_reaches(program: Examined, fault: Provenance, first: int, positions: int) -> int:
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
