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
    TripProbe,
    code_of,
    code_of_argument,
    first_fault,
)
from mpjax.inspection.trials import argument_name
from mpjax.program.dtypes import is_inexact, widened
from mpjax.program.graph import lay_out
from mpjax.program.inlining import Node, Value, flow_of
from mpjax.program.interpreter import Eager, Instrumented, Key, Probe
from mpjax.program.owners import owners_of
from mpjax.program.primitives import primitive
from mpjax.program.source import BACKWARD, apart
from mpjax.program.tracing import TracedCall


class Examined:
    """A program laid out. Its leaves are its arguments, followed by the arrays that it closes over.

    Attributes:
        codes: The codes of its results, once its fault was searched.
        replay: What led to them.
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
        self.codes: Sequence[int]
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
        fault, self.codes, self.replay = self.replayed()
        self.compiled = self.compiled or self.evaluated.compiled
        return None if fault is not None and self.is_repaired and self.replayed(seed=1)[0] != fault else fault

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
        return is_derivative(self.flow, self.nodes[number], self.primal)

    @functools.cached_property
    def nodes(self) -> dict[int, Node]:
        """The equations, by number."""
        nodes = iter(self.flow.eqns)  # which also has the insides of kernels, and inlines calls
        rows = {n: primitive(place.name) for n, place in self.places.items()}
        left = ((n, self.places[n].eqn) for n, row in rows.items() if not (row.call or row.shards))
        return {n: next(node for node in nodes if node.site.eqn is eqn) for n, eqn in left}

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
        count = len(self.names)
        return evaluation.block(self.block, leaves[:count], consts=leaves[count:])

    def replayed(self, low: int = 0, high: int = 0, seed: float = 0) -> tuple[Provenance | None, Sequence[int], Replay]:
        """The first fault, the codes of the results and what led to them.

        Args:
            low, high: The positions of the elements of `kept` that are kept.
            seed: Chooses the numbers in place of faults.
        """
        if (replace := self.evaluated.replace) is not None:
            self.evaluated.replace = Partial(replace.func, *_span(low, high, seed))
        leaves = self._leaves(seed)
        outs, notes = self.run(self.evaluated, leaves)
        codes, arguments, notes = jax.device_get((_codes(outs), _codes(leaves), notes))
        arguments = list(map(code_of_argument, leaves, arguments))
        fault, replay = first_fault(self.block, arguments, codes, notes, self.is_repaired)
        return fault, codes, replay

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
        replace = with_constants(held, finite_but(probe, self.finite, self.kept))
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
    none = None, without.replayed()[0]

    def reaches(low: int, high: int) -> bool:
        return without.replayed(low, high)[0] not in none

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
