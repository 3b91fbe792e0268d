"""Islands: stretches of arithmetic that the backward pass computes again instead of storing.

A normalisation, a softmax, a GELU or a loss starts from half activations and stores float32 values for its
derivative, several for each element. An island is issued under `jax.checkpoint`, so that only what goes in
is stored, which is half. Only cheap work is computed again: elementwise operations and reductions,
no matmul, loop, sort, random number or collective.

An island has the float32 arithmetic of a stretch between matmuls, and of the half arithmetic around it as much as
makes what is stored the least: with a bias in it, the matmul's own result is what is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import MATMULS, Op, Saves, primitive
from mpjax.casting.classify import tracked
from mpjax.casting.states import FULL, INPUT, LOW, RAW, State

JITS = frozenset({"jit", "pjit"})
_CALLS = JITS | {"custom_jvp_call", "closed_call"}

# How many steps an island may begin before its float32 arithmetic, and end behind it: a bound on the time of planning.
_REACH = 32

# A value and the slot that it is read in.
Read = tuple[Any, int]
_MASK = -2  # in the place of a slot: which of a value's elements are positive, or the like
_ITEMSIZE = {LOW: 2, _MASK: 1}


@dataclasses.dataclass(slots=True)
class Island:
    """Steps that are issued together under `jax.checkpoint`.

    Args:
        steps: the steps.
        ins: what they read from outside, and the slot of each.
        given: for each of these whether it is an input of the program as it is, a parameter for instance.
        outs: what is read of theirs outside, and the slots.
    """

    steps: list[Any]
    ins: tuple[Read, ...]
    given: tuple[bool, ...]
    outs: tuple[Read, ...]


def cheap(eqn: Any) -> bool:
    """Whether an equation may be computed a second time."""
    name = eqn.primitive.name
    if eqn.effects or primitive(name).expensive:
        return False
    if name == "gather":  # that picks, as a loss does with its labels, and does not spread
        return eqn.outvars[0].aval.size <= eqn.invars[0].aval.size
    if name in _CALLS:
        return not any(eqn.params.get("donated_invars", ())) and all(map(cheap, _inside(eqn)))
    return "jaxpr" not in eqn.params and "branches" not in eqn.params and not name.startswith(("random", "threefry"))


def _inside(eqn: Any) -> Sequence[Any]:
    jaxpr = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return compat.open_jaxpr(jaxpr).jaxpr.eqns


def _kept(eqn: Any) -> Iterator[Any]:
    """About what the derivative of an equation stores."""
    name = eqn.primitive.name
    if name in _CALLS:
        for inner in _inside(eqn):
            yield from _kept(inner)
    elif primitive(name).saves is not Saves.NOTHING and any(map(tracked, eqn.outvars)):
        if name in ("mul", "div") and any(isinstance(v, compat.Literal) for v in eqn.invars):
            return
        yield from _variables(eqn) if primitive(name).saves is Saves.INPUTS else eqn.outvars


def form(steps: Sequence[Any], states: dict[Any, State], read_outside: Sequence[Read]) -> list[Any]:
    """Divides steps into islands and the rest, in their order.

    Args:
        steps: the steps of a plan.
        states: the states of its values.
        read_outside: the outputs of the plan, and their slots.
    """
    stretches = _Stretches(steps, states, read_outside)
    formed: list[Any] = []
    run: list[Any] = []
    made: set[Any] = set()

    def close() -> None:
        """Ends the run of steps."""
        for part in _connected(run):
            formed.extend(stretches.divided(part))
        run.clear()
        made.clear()

    for step in steps:
        if _belongs(step):
            run.append(step)
            made.update(step.eqn.outvars)
        elif run and not step.eqn.effects and made.isdisjoint(_variables(step.eqn)):
            formed.append(step)  # a mask, or the matmul of another branch, of no value in the run: it may go first
        else:
            close()
            formed.append(step)
    close()
    return formed


def _connected(run: Sequence[Any]) -> Iterable[list[Any]]:
    """Parts of a run that have nothing to do with each other, as of two branches; each in its order."""
    joined = list(range(len(run)))  # each step to an earlier one of its part, or to itself
    maker: dict[Any, int] = {}

    def first(i: int) -> int:
        while joined[i] != i:
            joined[i] = i = joined[joined[i]]
        return i

    for i, step in enumerate(run):
        for v in _variables(step.eqn):
            if v in maker:
                a, b = first(i), first(maker[v])
                joined[max(a, b)] = min(a, b)
        maker.update((v, i) for v in step.eqn.outvars)
    parts: dict[int, list[Any]] = {}
    for i, step in enumerate(run):
        parts.setdefault(first(i), []).append(step)
    return parts.values()


def _variables(eqn: Any) -> list[Any]:
    return [v for v in eqn.invars if not isinstance(v, compat.Literal)]


def _floats(step: Any) -> list[Any]:
    return [*filter(tracked, step.eqn.invars), *filter(tracked, step.eqn.outvars)]


def _belongs(step: Any) -> bool:
    if step.action == "skip":
        return True
    if step.action == "jit":
        return step.inner.plan.setting.folded
    if step.action == "custom_jvp_call":
        return cheap(step.eqn)
    if step.action not in ("bind", "alias") or step.verdict.op is Op.OPAQUE or not cheap(step.eqn):
        return False
    return bool(_floats(step)) or primitive(step.eqn.primitive.name).mask


class _Stretches:
    """What is known of a plan's values while its stretches of cheap steps are divided."""

    def __init__(self, steps: Sequence[Any], states: dict[Any, State], read_outside: Sequence[Read]):
        self.states = states
        self.readers: dict[Read, list[int]] = {}
        self.stored: set[Read] = set()  # by a matmul, whatever becomes of the rest
        for step in steps:
            for read in step.touched:
                self.readers.setdefault(read, []).append(id(step))
                if step.eqn.primitive.name in MATMULS:
                    self.stored.add(read)
        for read in read_outside:
            self.readers.setdefault(read, []).append(0)

    def divided(self, run: Sequence[Any]) -> list[Any]:
        """A run of cheap steps with an island in it, if one saves memory."""
        kept = [self._kept_by(step) for step in run]
        wide = [i for i, reads in enumerate(kept) if any(slot == FULL for _, slot in reads)]
        if not wide:
            return list(run)
        # Where it begins depends on where it ends: what stands behind it may need what stands before it.
        first, last = wide[0], wide[-1]
        for _ in range(2):
            first = self._best_start(run, kept, wide[0], last)
            last = self._best_end(run, kept, first, wide[-1])
        inside = list(run[first : last + 1])
        ins, outs = self._ins(inside), self._outs(inside)
        before = self._bytes({read for reads in kept for read in reads})
        if not outs or before <= self._cost(kept, first, last, ins):
            return list(run)
        return [*run[:first], Island(inside, ins, tuple(self._given(v) for v, _ in ins), outs), *run[last + 1 :]]

    def _kept_by(self, step: Any) -> list[Read]:
        """What the derivative of a step stores, in which slots."""
        if step.action == "jit":
            return [read for inner in step.inner.plan.steps for read in self._kept_by(inner)]
        if step.action == "custom_jvp_call":  # a mask, as that of a relu
            return [(v, _MASK) for v in step.eqn.outvars]
        if step.action != "bind":
            return []
        slot = LOW if step.low else FULL
        return [(v, slot) for v in _kept(step.eqn) if tracked(v)]

    def _best_start(self, run: Sequence[Any], kept: Sequence[list[Read]], first: int, last: int) -> int:
        """Where an island up to `last` begins so that the least is stored; the earliest of equals."""
        starts = range(max(first - _REACH, 0), first + 1)
        costs = {i: self._cost(kept, i, last, self._ins(run[i : last + 1])) for i in starts}
        return min(costs, key=lambda i: (costs[i], i))

    def _best_end(self, run: Sequence[Any], kept: Sequence[list[Read]], first: int, last: int) -> int:
        """Where an island from `first` ends so that the least is stored; of equals, where the least comes out of it.

        What comes out has a cotangent, which the backward pass holds as it enters the island: better half than float32.
        """
        ends = range(last, min(last + _REACH, len(run)))
        costs = {i: self._cost(kept, first, i, self._ins(run[first : i + 1])) for i in ends}
        least = [i for i, cost in costs.items() if cost == min(costs.values())]
        return min(least, key=lambda i: (self._size(self._outs(run[first : i + 1])), i))

    def _cost(self, kept: Sequence[list[Read]], first: int, last: int, ins: Sequence[Read]) -> int:
        """The bytes that are stored with an island from the first to the last step."""
        outside = (read for reads in (*kept[:first], *kept[last + 1 :]) for read in reads)
        return self._bytes({*ins, *outside})

    def _bytes(self, reads: set[Read]) -> int:
        """What it takes to store values that nothing else stores."""
        return self._size((v, slot) for v, slot in reads - self.stored if not self._given(v))

    def _given(self, v: Any) -> bool:
        """Whether a value is an input of the program as it is, which is there anyway."""
        return v in self.states and self.states[v].kind == INPUT

    def _size(self, reads: Iterable[Read]) -> int:
        shaped = ((v.aval, slot) for v, slot in reads if compat.is_shaped(v.aval))
        return sum(aval.size * _ITEMSIZE.get(slot, aval.dtype.itemsize) for aval, slot in shaped)

    def _ins(self, steps: Sequence[Any]) -> tuple[Read, ...]:
        made = {v for step in steps if step.action != "skip" for v in step.eqn.outvars}
        ins: dict[Read, None] = {}
        for step in steps:
            for v, slot in step.touched:
                if v not in made:
                    ins[v, slot if slot == RAW else self.states[v].slot] = None
        return tuple(ins)

    def _outs(self, steps: Sequence[Any]) -> tuple[Read, ...]:
        inside = {id(step) for step in steps}
        return tuple(
            (v, slot)
            for step in steps
            if step.action != "skip"
            for v in step.eqn.outvars
            for slot in ((FULL, LOW) if v in self.states and tracked(v) else (RAW,))
            if any(reader not in inside for reader in self.readers.get((v, slot), ()))
        )
