"""A program that is searched for faults: run as it is, without some of its faults, and at one point."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from mpjax.inspection.nonfinite.evidence import is_derivative, primal
from mpjax.inspection.nonfinite.point import PointProbe, Reached, finite, finite_but, is_integer
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
from mpjax.program.inlining import Node, flow_of
from mpjax.program.interpreter import Eager, Instrumented, Key, Probe
from mpjax.program.owners import owners_of
from mpjax.program.source import BACKWARD
from mpjax.program.tracing import TracedCall

# By name: a `while` may end at a NaN.

Watched = tuple[bool, dict[int, int], Sequence[int]]  # one run: `watched`, and the codes of the results


class Examined:
    """A program laid out. Its leaves are its arguments, followed by the arrays that it closes over.

    Attributes:
        fault: The first fault, once it was searched.
        codes: The codes of its results.
        replay: What led to them.
        finite: The numbers of the equations whose elements are made finite, because their fault is known.
    """

    def __init__(self, traced: TracedCall):
        owners = owners_of(traced.jaxpr, traced.names)
        self.block, self.flow = lay_out(traced.jaxpr, owners=owners), flow_of(traced.jaxpr, owners)
        self.names, self.leaves = traced.names, [*traced.arrays, *self.block.consts]
        self.places = {place.number: place for place in self.block.places()}
        self.whiles = [place for place in self.places.values() if place.name == "while"]
        self.finite: frozenset[int] = frozenset()  # the equations whose elements are made finite
        self.is_repaired = False
        self.fault: Provenance
        self.codes: Sequence[int] = ()  # of the results
        self.replay: Replay
        self._start()

    def _start(self) -> None:
        self.watched = functools.cache(self._watched)
        self._evaluation: Eager | None = None

    @property
    def ends(self) -> bool:
        """Whether its loops end when elements are made finite: their conditions read only counters."""
        read = (v for place in self.whiles for site in place.blocks[0].places() for v in site.invars)
        return all(is_integer(v) for v in read)

    def repaired(self) -> Examined:
        """The program without its fault: the elements that are not finite are 1."""
        program, fault = copy.copy(self), self.fault
        if fault.is_argument:
            program.leaves = [finite(x) if i == fault.number else x for i, x in enumerate(self.leaves)]
        else:
            program.finite = self.finite.union(self._alike(fault), (n for n in self.places if self._follows(n, fault)))
        program.is_repaired = True
        program._start()
        return program

    def explains(self, other: Provenance) -> bool:
        """Whether another fault only follows from this one, on the same line."""
        if self.fault.is_argument or other.is_argument:
            return False
        one, two = self.places[self.fault.number], self.places[other.number]
        if one.source != two.source:
            return False
        reads, writes = self.node(other.number).reads, self.node(self.fault.number).writes
        depends = one.phase == two.phase and any(self.flow.depends(reads, v) for v in writes)
        # In the loop of the backward pass, the operand of a derivative is an array of all iterations.
        in_loop = self.fault.indices(self.places) == other.indices(self.places) != ()
        return depends or (in_loop and two.phase == BACKWARD) or self._follows(other.number, self.fault)

    def _follows(self, number: int, fault: Provenance) -> bool:
        """Whether an equation of the line of a fault computes its derivative."""
        place, here = self.places[number], self.places[fault.number]
        if place.source != here.source or place.blocks or number == fault.number:
            return False
        node, first = self.node(number), self.node(fault.number)
        of = {v.whole or v for v in (*first.reads, *first.writes)}
        is_derivative = place.phase == BACKWARD or self.is_derivative(number)
        return is_derivative and not of.isdisjoint(v.whole or v for v in node.reads)

    def is_derivative(self, number: int) -> bool:
        """Whether an equation of the forward pass, or of its recomputation, only computes a derivative."""
        return is_derivative(self.flow, self.node(number), self.primal)

    def node(self, number: int) -> Node:
        """An equation."""
        return self._nodes[id(self.places[number].eqn), self.places[number].phase]

    @functools.cached_property
    def _nodes(self) -> dict[tuple[int, str], Node]:
        return {(id(node.site.eqn), node.site.phase): node for node in reversed(self.flow.eqns)}

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

    def point(self, fault: Provenance, at: tuple[Any, ...] | None = None, wide: bool = False) -> tuple[bool, Any]:
        """Whether the point of a fault is reached, and what a `PointProbe` measures there."""
        probe = PointProbe(self.places[fault.number], fault.iteration, at, wide)
        leaves = [*map(widened, self.leaves)] if wide else self.leaves
        try:
            return jax.device_get(self.run(self.evaluation(probe, wide), leaves)[1][probe.noted[0]])
        except Reached as found:  # outside of loops, the rest of the program need not run
            return jax.device_get(found.args[0])

    def _watched(self, fault: Provenance | None = None, span: tuple[int, int] = (0, 0)) -> Watched:
        """Runs the program; with a fault, with its elements made finite except those in a span of positions."""
        if fault is None or self._evaluation is None:  # which compiles loops once
            self._evaluation = self.evaluation(WatchProbe(), fault=fault)
        evaluation = self._evaluation
        if evaluation.replace is not None:
            evaluation.replace = Partial(evaluation.replace.func, jax.tree.map(np.int32, span))
        outs, notes = self.run(evaluation, self.leaves)
        codes, notes = jax.device_get((_codes(outs), notes))
        return *watched(notes), codes

    def evaluation(self, probe: Probe, wide: bool = False, fault: Provenance | None = None) -> Eager:
        """An evaluation with the elements of earlier faults, and of a fault, made finite."""
        alike = self.finite | (self._alike(fault) & {when[-1] for when in self.replay.made} if fault else set())
        replace = Partial(finite_but(probe, alike, fault), (np.int32(0), np.int32(0))) if alike else None
        return Eager(probe, wide, replace)

    def _alike(self, fault: Provenance) -> set[int]:
        """The equation of a fault, and the same operation of the same line in repeated layers."""

        def kind(number: int) -> tuple[Any, ...]:
            place = self.places[number]
            return place.name, place.source, place.phase == BACKWARD

        first, derivative = kind(fault.number), self.is_derivative(fault.number)
        return {n for n in self.places if kind(n) == first and self.is_derivative(n) == derivative}


def search(program: Examined) -> Provenance | None:
    """The first fault. A program without `while` runs only once."""
    trips = program.watched()[1] if program.whiles else {}
    outs, notes = program.run(program.evaluation(CodeProbe(program.block, trips)), program.leaves)
    program.codes, arguments = jax.device_get((_codes(outs), _codes(program.leaves)))
    arguments = list(map(code_of_argument, program.leaves, arguments))
    fault, program.replay = first_fault(
        program.block, arguments, program.codes, jax.device_get(notes), program.is_repaired
    )
    if fault is not None:
        program.fault = fault
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
