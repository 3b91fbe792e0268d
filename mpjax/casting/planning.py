"""The forward half of planning: the dtype of each value of a program, and why.

A plan is a list of steps, one for each equation. It depends on nothing but the program's text and
the setting (no Python ids, no dict order), so the same program gives the same rewritten jaxpr and
compilation caches hit. Plans of inner programs are kept by their jaxpr: a layer that is called often
is planned once.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import MATMULS, Op, primitive
from mpjax.casting.classify import Setting, Verdict, tracked
from mpjax.casting.demand import MAY_HALF, WANT_FLOAT, WANT_HALF, demand
from mpjax.casting.islands import Island, form
from mpjax.casting.states import (
    COMPUTED,
    FLOAT,
    FULL,
    HALF,
    INPUT,
    LOW,
    PINNED,
    RAW,
    State,
    at_boundary,
    literal_kind,
    softened,
)
from mpjax.policy import HALF_DTYPES

# The planners of equations with programs inside; `entering` fills it in.
ENTER: dict[str, Callable[[Planner, Any, Verdict], Step]] = {}

# The same for each list of first-order operations; `deciding` fills it in.
DECIDERS: dict[Op, Callable[[Planner, Any, Verdict], Step]] = {}

# How a step is carried out (`rewriting`).
BIND, ALIAS, SKIP = "bind", "alias", "skip"


@dataclasses.dataclass(slots=True)
class Step:
    """One equation of a program and what becomes of it.

    Args:
        eqn: the equation as it was traced.
        action: how it is issued: `BIND`, `ALIAS` (the result is the input), `SKIP` (nothing reads it) or the
            name of a primitive with a program inside.
        reads: for each input the slot that is read.
        outs: for each output its state; None where autocast has no say (integers, float64).
        why: the reason, for people.
        low: computes in half.
        spread: the inputs that are smaller than the output, to be broadcast in float32 before the cast:
            the derivative with respect to them is a sum.
        inner: the plan of the program inside, if it has one, or the plans.
        verdict: the verdict of the rules.
        touched: each value that it reads, and in which slot.
    """

    eqn: Any
    action: str
    reads: tuple[int, ...]
    outs: tuple[State | None, ...]
    why: str
    verdict: Verdict
    low: bool = False
    spread: tuple[int, ...] = ()
    inner: Any = None
    touched: tuple[tuple[Any, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """What a plan came to, programs inside included: how many matmuls and convolutions it casts, finds half
    already, leaves alone; and the user's rules that matched."""

    cast: int = 0
    written: int = 0
    left: int = 0
    entries: frozenset[Any] = frozenset()

    def __add__(self, other: Tally) -> Tally:
        entries = self.entries | other.entries
        return Tally(self.cast + other.cast, self.written + other.written, self.left + other.left, entries)


@dataclasses.dataclass(eq=False, slots=True)
class Plan:
    """The plan of a program: what `rewriting.run` carries out and `explain` shows.

    Args:
        setting: half dtype, rules, region.
        steps: one for each equation, in order; some stand together in an `Island`.
        invars, constvars, outvars: the program's variables.
        in_states, out_states: states of its inputs and outputs; None where autocast has no say.
        in_reads, const_reads: for each input the slots that are read, as a bit mask.
        trivial: it runs as it was traced, so its equation can be issued as it stands.
        tally: what it came to.
        runners: what `rewriting` has made of it, kept so that JAX's own caches know it again.
    """

    setting: Setting
    steps: list[Step | Island]
    invars: Sequence[Any]
    constvars: Sequence[Any]
    outvars: Sequence[Any]
    in_states: tuple[State | None, ...]
    out_states: tuple[State | None, ...]
    in_reads: tuple[int, ...]
    const_reads: tuple[int, ...]
    trivial: bool
    tally: Tally
    runners: dict[Any, Any] = dataclasses.field(default_factory=dict)


_cache: weakref.WeakKeyDictionary[Any, dict[Any, Plan]] = weakref.WeakKeyDictionary()


def plan(jaxpr: Any, in_states: tuple[State | None, ...], wanted: tuple[int, ...], setting: Setting) -> Plan:
    """The plan of a jaxpr for these states of its inputs and these demands on its outputs."""
    jaxpr = compat.open_jaxpr(jaxpr).jaxpr
    known = _cache.setdefault(jaxpr, {})
    key = (in_states, wanted, setting)
    if key not in known:
        known[key] = Planner(jaxpr, in_states, wanted, setting).plan()
    return known[key]


class Planner:
    """Goes through a program once, forwards; `enter` has the equations with programs inside."""

    def __init__(self, jaxpr: Any, in_states: Sequence[State | None], wanted: tuple[int, ...], setting: Setting):
        self.jaxpr, self.wanted, self.setting = jaxpr, wanted, setting
        self.flags, self.verdicts, _ = demand(jaxpr, wanted, setting)
        self.in_states = tuple(in_states)
        self.states: dict[Any, State] = {}
        self.reads: dict[Any, int] = {}
        self.log: list[tuple[Any, int]] = []
        self.trivial = True
        self.tally = Tally()
        for v in jaxpr.constvars:
            if tracked(v):
                self.states[v] = State(INPUT, FULL)
        for v, state in zip(jaxpr.invars, in_states, strict=True):
            if state is not None:
                self.states[v] = state

    def plan(self) -> Plan:
        steps: list[Step | Island] = [
            self._step(eqn, verdict) for eqn, verdict in zip(self.jaxpr.eqns, self.verdicts, strict=True)
        ]
        self.log = []
        out_states = tuple(self._out(v, flags) for v, flags in zip(self.jaxpr.outvars, self.wanted, strict=True))
        if self.setting.recompute and not self.setting.folded and not self.trivial:
            steps = form(steps, self.states, self.log)
        jaxpr = self.jaxpr
        return Plan(
            self.setting,
            steps,
            jaxpr.invars,
            jaxpr.constvars,
            jaxpr.outvars,
            self.in_states,
            out_states,
            tuple(self.reads.get(v, 0) for v in jaxpr.invars),
            tuple(self.reads.get(v, 0) for v in jaxpr.constvars),
            self.trivial,
            self.tally,
        )

    # What is known of a value, and the note of how it is read.

    def state(self, v: Any) -> State | None:
        """The state of a value that an equation reads."""
        if not tracked(v):
            return None
        if isinstance(v, compat.Literal):
            return State(literal_kind(v, self.setting.half), FULL)
        return self.states[v]

    def seen(self, v: Any) -> State | None:
        """The state as an infer reader sees it."""
        state = self.state(v)
        if state is None or isinstance(v, compat.Literal):
            return state
        return State(softened(state.kind, self.flags.get(v, 0)), state.slot)

    def read(self, v: Any, slot: int) -> int:
        """Notes that a value is read in a slot."""
        if not tracked(v):
            if not isinstance(v, compat.Literal):
                self.log.append((v, RAW))
            return RAW
        if not isinstance(v, compat.Literal):
            self.log.append((v, slot))
            self.reads[v] = self.reads.get(v, 0) | 1 << slot
            if slot == LOW or self.states[v].slot == LOW:
                self.trivial = False
        return slot

    def asked(self, eqn: Any) -> int:
        """All that is asked of an equation's outputs."""
        flags = 0
        for v in eqn.outvars:
            flags |= self.flags.get(v, 0)
        return flags

    def only_half(self, eqn: Any) -> bool:
        """Whether all that reads an equation's outputs reads them in half."""
        asked = self.asked(eqn)
        return bool(asked & WANT_HALF) and not asked & (WANT_FLOAT | MAY_HALF)

    def _out(self, v: Any, flags: int) -> State | None:
        state = self.state(v)
        if state is None:
            self.read(v, RAW)
            return None
        state = at_boundary(state, flags)
        self.read(v, state.slot)
        return state

    def moved(self, v: Any, out: Any) -> State:
        """The state of a value that is only moved about: as it was, or in half if only half is read."""
        state, flags = self.state(v), self.flags.get(out, 0)
        assert state is not None
        only_half = flags & WANT_HALF and not flags & (WANT_FLOAT | MAY_HALF)
        if only_half and state.slot == FULL and state.kind != PINNED and not isinstance(v, compat.Literal):
            return State(HALF if state.kind == FLOAT else state.kind, LOW)
        return state

    # One equation.

    def _step(self, eqn: Any, verdict: Verdict) -> Step:
        self.log = []
        step = self._decide(eqn, verdict)
        step.touched = tuple(self.log)
        self._count(step)
        for v, state in zip(eqn.outvars, step.outs, strict=step.action != SKIP):
            if state is not None:
                self.states[v] = state
                if state.slot == LOW:
                    self.trivial = False
        return step

    def _count(self, step: Step) -> None:
        if step.verdict.entry is not None:
            self.tally += Tally(entries=frozenset({step.verdict.entry}))
        for inner in inner_plans(step):
            self.tally += inner.tally
        if step.eqn.primitive.name in MATMULS and step.action != SKIP:
            operands = [v.aval.dtype for v in step.eqn.invars[:2]]
            if step.low:
                self.tally += Tally(cast=1)
            elif all(dtype in HALF_DTYPES for dtype in operands):
                self.tally += Tally(written=1)
            elif any(map(tracked, step.eqn.invars)):
                self.tally += Tally(left=1)

    def _decide(self, eqn: Any, verdict: Verdict) -> Step:
        if not self.asked(eqn) and not eqn.effects:
            for v in eqn.outvars:
                if tracked(v):
                    self.states[v] = State(COMPUTED, FULL)
            return Step(eqn, SKIP, (), (), "nothing reads it", verdict)
        if verdict.op is Op.ENTER:
            step = ENTER[eqn.primitive.name](self, eqn, verdict)
            self.trivial &= step.action == BIND
            return step
        if not any(map(tracked, eqn.invars)) and not any(map(tracked, eqn.outvars)):
            reads = tuple(self.read(v, RAW) for v in eqn.invars)
            return Step(eqn, BIND, reads, (None,) * len(eqn.outvars), "no float32", verdict)
        return DECIDERS[verdict.op](self, eqn, verdict)

    def kind(self, eqn: Any) -> int:
        """The kind of what comes of an equation's inputs together."""
        kinds = [state.kind for state in map(self.seen, eqn.invars) if state is not None]
        if not kinds:
            return made_of(eqn)
        kind = max(kinds)
        return FLOAT if kind == PINNED else max(kind, COMPUTED)

    def full(self, eqn: Any, verdict: Verdict, kind: int, why: str) -> Step:
        """A step that computes in float32."""
        reads = tuple(self.read(v, FULL) for v in eqn.invars)
        outs = tuple(State(kind, FULL) if tracked(v) else None for v in eqn.outvars)
        return Step(eqn, BIND, reads, outs, why, verdict)

    def low(self, eqn: Any, verdict: Verdict, kind: int, why: str) -> Step:
        """A step that computes in half."""
        spread = self._spread(eqn)
        reads = tuple(self.read(v, FULL if i in spread else LOW) for i, v in enumerate(eqn.invars))
        if eqn.primitive.name == "mul":
            for i in spread:
                self.read(eqn.invars[i], LOW)
        outs = tuple(State(kind, LOW) if tracked(v) else None for v in eqn.outvars)
        self.trivial = False
        return Step(eqn, BIND, reads, outs, why, verdict, low=True, spread=spread)

    def _spread(self, eqn: Any) -> tuple[int, ...]:
        if not primitive(eqn.primitive.name).elementwise:
            return ()
        shape = eqn.outvars[0].aval.shape
        return tuple(
            i
            for i, v in enumerate(eqn.invars)
            if tracked(v) and v.aval.shape != shape and not isinstance(v, compat.Literal)
        )


def inner_plans(step: Step) -> tuple[Plan, ...]:
    """The plans of the programs inside a step."""
    return step.inner.plans if step.inner is not None else ()


def made_of(eqn: Any) -> int:
    """The kind of a float32 value that is made of none: of integers castable, of complex or float64 not."""
    floats = (v.aval.dtype for v in eqn.invars if compat.is_shaped(v.aval))
    return FLOAT if any(dtype.kind in "fc" or dtype.kind == "V" for dtype in floats) else COMPUTED
