"""Planning of equations with programs inside: what goes in and comes out of each in which dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpjax._jaxpr import compat
from mpjax.casting.classify import Setting, Verdict, tracked
from mpjax.casting.demand import OUTPUT, RETURNED, call_jaxpr, scan_demand, while_demand
from mpjax.casting.islands import JITS, cheap
from mpjax.casting.planning import BIND, ENTER, Plan, Planner, Step, plan
from mpjax.casting.states import (
    COMPUTED,
    FULL,
    HALF,
    INPUT,
    LOW,
    PINNED,
    RAW,
    ZERO,
    State,
    at_boundary,
    carried,
    join,
)

Delivery = tuple[tuple[int, int], ...]  # (operand, slot) pairs: an operand may go in in both dtypes


@dataclasses.dataclass(slots=True)
class Call:
    """One program inside, and the slots in which its operands are handed in."""

    plan: Plan
    delivery: Delivery

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (self.plan,)


@dataclasses.dataclass(slots=True)
class Loop:
    """A loop's body, the states of its carry, and for a `while` the condition."""

    body: Plan
    num_consts: int
    carry: tuple[State | None, ...]
    delivery: Delivery  # of the scanned operands
    condition: Plan | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (self.body,) if self.condition is None else (self.condition, self.body)


@dataclasses.dataclass(slots=True)
class Branches:
    """The branches of a conditional, which agree on their outputs."""

    plans: tuple[Plan, ...]
    delivery: Delivery


def _wanted(planner: Planner, eqn: Any) -> tuple[int, ...]:
    return tuple(planner.flags.get(v, 0) for v in eqn.outvars)


def _handed(planner: Planner, variables: Sequence[Any]) -> tuple[State | None, ...]:
    return tuple(planner.seen(v) for v in variables)


def _outs(eqn: Any, states: Sequence[State | None]) -> tuple[State | None, ...]:
    return tuple(state if tracked(v) else None for v, state in zip(eqn.outvars, states, strict=True))


def _as_traced(planner: Planner, eqn: Any, verdict: Verdict, outs: Sequence[State | None], *plans: Plan) -> Step:
    """The equation as it stands: nothing inside is changed."""
    reads = tuple(planner.read(v, FULL) for v in eqn.invars)
    return Step(eqn, BIND, reads, _outs(eqn, outs), "nothing inside to cast", verdict, inner=Branches(plans, ()))


def _deliver(planner: Planner, eqn: Any, slots: Sequence[Sequence[int]]) -> Delivery:
    return tuple((i, planner.read(eqn.invars[i], slot)) for i, wanted in enumerate(slots) for slot in wanted)


def _slots(mask: int) -> list[int]:
    return [slot for slot in (FULL, LOW) if mask & 1 << slot]


def _inner_plan(planner: Planner, eqn: Any, verdict: Verdict, jaxpr: Any, wanted: tuple[int, ...]) -> Plan:
    setting: Setting = planner.setting.inside(eqn, verdict.region)
    if setting.recompute and eqn.primitive.name in JITS and cheap(eqn):
        setting = dataclasses.replace(setting, folded=True)
    return plan(jaxpr, _handed(planner, eqn.invars), wanted, setting)


def _jit(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    inner = _inner_plan(planner, eqn, verdict, call_jaxpr(eqn.params), _wanted(planner, eqn))
    if inner.trivial:
        return _as_traced(planner, eqn, verdict, inner.out_states, inner)
    donated = eqn.params.get("donated_invars") or (False,) * len(eqn.invars)
    slots = []
    for v, mask, is_donated in zip(eqn.invars, inner.in_reads, donated, strict=True):
        state = planner.state(v)
        if state is None:
            slots.append([RAW])
        elif is_donated or state.slot == LOW or not mask:
            slots.append([state.slot])
        else:
            slots.append(_slots(mask))
    delivery = _deliver(planner, eqn, slots)
    return Step(eqn, "jit", (), _outs(eqn, inner.out_states), "entered", verdict, inner=Call(inner, delivery))


def _remat(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    inner = _inner_plan(planner, eqn, verdict, call_jaxpr(eqn.params), _wanted(planner, eqn))
    if inner.trivial:
        return _as_traced(planner, eqn, verdict, inner.out_states, inner)
    slots = []
    for v, mask in zip(eqn.invars, inner.in_reads, strict=True):
        state = planner.state(v)
        # What goes in is stored until the backward pass. A parameter is stored anyway: its cast
        # stays inside. Of an activation only the half that is read is worth storing.
        if state is None:
            slots.append([RAW])
        elif state.slot == FULL and mask == 1 << LOW and state.kind not in (INPUT, PINNED):
            slots.append([LOW])
        else:
            slots.append([state.slot])
    delivery = _deliver(planner, eqn, slots)
    return Step(eqn, "remat2", (), _outs(eqn, inner.out_states), "entered", verdict, inner=Call(inner, delivery))


def _custom_rule(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    inner = _inner_plan(planner, eqn, verdict, call_jaxpr(eqn.params), _wanted(planner, eqn))
    name = eqn.primitive.name
    # A custom_vjp's backward rule may hold matmuls where the function holds none, so it is entered
    # whenever it takes a float.
    bare = name == "custom_jvp_call" or not any(map(tracked, eqn.invars))
    if inner.trivial and bare:
        return _as_traced(planner, eqn, verdict, inner.out_states, inner)
    slots = []
    for v, mask in zip(eqn.invars, inner.in_reads, strict=True):
        state = planner.state(v)
        if state is None:
            slots.append([RAW])
        else:
            slots.append([LOW if mask == 1 << LOW else state.slot])
    delivery = _deliver(planner, eqn, slots)
    return Step(
        eqn,
        name,
        (),
        _outs(eqn, inner.out_states),
        "entered; the rule is kept",
        verdict,
        inner=Call(inner, delivery),
    )


def _shard_map(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    inner = _inner_plan(planner, eqn, verdict, call_jaxpr(eqn.params), _wanted(planner, eqn))
    if inner.trivial:
        return _as_traced(planner, eqn, verdict, inner.out_states, inner)
    in_specs, _ = compat.shard_map_specs(eqn.params)
    axes = compat.shard_map_options(eqn.params)["axis_names"]
    slots = []
    for v, mask, spec in zip(eqn.invars, inner.in_reads, in_specs, strict=True):
        state = planner.state(v)
        if state is None:
            slots.append([RAW])
        elif not axes <= _axes_of(spec):
            slots.append([FULL])  # replicated: its cotangents are summed over the devices
        elif state.kind == INPUT or not mask:
            slots.append([state.slot])
        else:
            slots.append([LOW] if mask == 1 << LOW else [state.slot])
    delivery = _deliver(planner, eqn, slots)
    return Step(eqn, "shard_map", (), _outs(eqn, inner.out_states), "entered", verdict, inner=Call(inner, delivery))


def _axes_of(spec: Any) -> set[str]:
    names: set[str] = set()
    for entry in spec:
        names |= set(entry) if isinstance(entry, (tuple, list)) else {entry} if entry is not None else set()
    return names


def _cond(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    wanted = _wanted(planner, eqn)
    operands = eqn.invars[1:]
    setting = planner.setting.inside(eqn, verdict.region)
    plans = tuple(plan(branch, _handed(planner, operands), wanted, setting) for branch in eqn.params["branches"])
    outs = [_agreed(states, flags) for *states, flags in zip(*(p.out_states for p in plans), wanted, strict=True)]
    if all(p.trivial for p in plans) and all(out is None or out.slot == FULL for out in outs):
        return _as_traced(planner, eqn, verdict, outs, *plans)
    slots: list[list[int]] = [[RAW]]
    for i, v in enumerate(operands):
        state, mask = planner.state(v), 0
        for p in plans:
            mask |= p.in_reads[i]
        if state is None:
            slots.append([RAW])
        else:
            slots.append([LOW if mask == 1 << LOW else state.slot])
    delivery = _deliver(planner, eqn, slots)
    return Step(eqn, "cond", (), _outs(eqn, outs), "entered", verdict, inner=Branches(plans, delivery))


def _agreed(states: Sequence[State | None], flags: int) -> State | None:
    """The one state of an output that each branch has its own of."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    kind = known[0].kind
    for state in known[1:]:
        kind = join(kind, state.kind)
    if kind != HALF:
        return State(kind, FULL)
    slot = LOW if all(state.slot == LOW for state in known) else FULL
    return at_boundary(State(kind, slot), flags)


def _scan(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    num_consts, num_carry = compat.scan_split(eqn.params)
    setting = planner.setting.inside(eqn, verdict.region)
    wanted, _ = scan_demand(eqn.params, _wanted(planner, eqn), setting)
    split = num_consts + num_carry
    xs = _handed(planner, eqn.invars[split:])
    body, carry = _carry_fixpoint(
        planner, eqn, eqn.params["jaxpr"], num_consts, eqn.invars[num_consts:split], xs, wanted, setting
    )
    outs = [*carry, *body.out_states[num_carry:]]
    if body.trivial and all(out is None or out.slot == FULL for out in outs):
        return _as_traced(planner, eqn, verdict, outs, body)
    for v, mask in zip(eqn.invars[:num_consts], body.in_reads, strict=False):
        for slot in _slots(mask):
            planner.read(v, slot)
    for v, state in zip(eqn.invars[num_consts:split], carry, strict=True):
        if state is not None:
            planner.read(v, state.slot)
    delivery = []
    for i, (v, mask) in enumerate(zip(eqn.invars[split:], body.in_reads[split:], strict=True)):
        state = planner.state(v)
        # Slices of a parameter are cast in the loop, one layer at a time.
        slot = RAW
        if state is not None:
            slot = LOW if mask == 1 << LOW and state.kind in (COMPUTED, HALF) else state.slot
        delivery.append((split + i, planner.read(v, slot)))
    loop = Loop(body, num_consts, carry, tuple(delivery))
    return Step(eqn, "scan", (), _outs(eqn, outs), "entered", verdict, inner=loop)


def _while(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    params = eqn.params
    num_condition, num_consts = params["cond_nconsts"], params["body_nconsts"]
    setting = planner.setting.inside(eqn, verdict.region)
    wanted, _ = while_demand(params, _wanted(planner, eqn), setting)
    first = num_condition + num_consts
    init = eqn.invars[first:]
    body, carry = _carry_fixpoint(
        planner, eqn, params["body_jaxpr"], num_consts, init, (), wanted, setting, skip=num_condition
    )
    condition_states = (*_handed(planner, eqn.invars[:num_condition]), *carry)
    condition = plan(params["cond_jaxpr"], condition_states, (OUTPUT,), setting)
    if body.trivial and condition.trivial and all(out is None or out.slot == FULL for out in carry):
        return _as_traced(planner, eqn, verdict, carry, condition, body)
    masks = (*condition.in_reads[:num_condition], *body.in_reads[:num_consts])
    for v, mask in zip(eqn.invars[:first], masks, strict=True):
        for slot in _slots(mask):
            planner.read(v, slot)
    for v, state in zip(init, carry, strict=True):
        if state is not None:
            planner.read(v, state.slot)
    loop = Loop(body, num_consts, carry, (), condition)
    return Step(eqn, "while", (), _outs(eqn, carry), "entered", verdict, inner=loop)


def _carry_fixpoint(
    planner: Planner,
    eqn: Any,
    body: Any,
    num_consts: int,
    init: Sequence[Any],
    xs: Sequence[State | None],
    wanted: tuple[int, ...],
    setting: Setting,
    skip: int = 0,
) -> tuple[Plan, tuple[State | None, ...]]:
    """The plan of a loop's body with carry states that it keeps, and those states."""
    jaxpr = compat.open_jaxpr(body).jaxpr
    consts = _handed(planner, eqn.invars[skip : skip + num_consts])
    ins = jaxpr.invars[num_consts : num_consts + len(init)]
    outs = jaxpr.outvars[: len(init)]
    kinds: list[int | None] = []
    for i, v in enumerate(init):
        state = planner.seen(v)
        asked = planner.flags.get(eqn.outvars[i], 0)
        kinds.append(None if state is None else _first_kind(state.kind, asked, jaxpr, ins[i], outs[i]))
    while True:
        carry = tuple(
            None if kind is None else carried(kind, flags) for kind, flags in zip(kinds, wanted, strict=False)
        )
        planned = plan(jaxpr, (*consts, *carry, *xs), wanted, setting)
        grown = [
            None if state is None or after is None else join(state.kind, after.kind)
            for state, after in zip(carry, planned.out_states, strict=False)
        ]
        # Kinds only rise, except that `carried` takes FLOAT down where half is read: compare after it.
        settled = all(
            kind is None or carried(kind, flags) == state
            for kind, state, flags in zip(grown, carry, wanted, strict=False)
        )
        if settled:
            return planned, carry
        kinds = grown


def _first_kind(kind: int, asked: int, jaxpr: Any, before: Any, after: Any) -> int:
    """The kind that a carry starts from; a sum and a state of the caller's must keep float32."""
    if kind == ZERO and _adds_to(jaxpr, before, after):
        return PINNED
    if kind == INPUT and asked & RETURNED and before is not after:
        return PINNED
    return kind


def _adds_to(jaxpr: Any, before: Any, after: Any) -> bool:
    """Whether `after` is `before` with something added: an accumulator."""
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def reaches(v: Any) -> bool:
        if v is before:
            return True
        eqn = None if isinstance(v, compat.Literal) else made.get(v)
        if eqn is None or eqn.primitive.name not in ("add", "add_any", "sub", "select_n", "copy", "reshape"):
            return False
        return any(map(reaches, eqn.invars))

    return after is not before and reaches(after)


ENTER.update(
    {
        "jit": _jit,
        "pjit": _jit,
        "closed_call": _jit,
        "call": _jit,
        "core_call": _jit,
        "remat2": _remat,
        "checkpoint": _remat,
        "scan": _scan,
        "while": _while,
        "cond": _cond,
        "shard_map": _shard_map,
        "custom_jvp_call": _custom_rule,
        "custom_vjp_call": _custom_rule,
    }
)
