"""What each list makes of an operation, given what is known of its inputs and asked of its outputs."""

from __future__ import annotations

from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import Op, primitive
from mpjax.casting.classify import OFF_REGION, PROMOTE_REGION, Verdict, tracked
from mpjax.casting.demand import HALVES
from mpjax.casting.planning import ALIAS, BIND, DECIDERS, Planner, Step, made_of
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
    exact_in_half,
)


def _active(kind: int) -> int:
    """The kind of a float32 result: it forces float32 on its readers only if it is an activation."""
    return FLOAT if kind >= HALF else COMPUTED


def _allow(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    mixed = any(
        compat.is_shaped(v.aval) and v.aval.dtype.kind in "fcV" and v.aval.dtype != planner.setting.half
        for v in eqn.invars
        if not tracked(v)
    )
    if mixed or not any(map(tracked, eqn.invars)):
        return planner.full(eqn, verdict, FLOAT, "its operands are of other dtypes")
    return planner.low(eqn, verdict, HALF, verdict.why)


def _deny(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    return planner.full(eqn, verdict, _active(planner.kind(eqn)), verdict.why)


def _opaque(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    why = verdict.why if verdict.region == OFF_REGION else f"opaque: {verdict.why}"
    return planner.full(eqn, verdict, _active(planner.kind(eqn)), why)


def _read(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    return planner.full(eqn, verdict, COMPUTED, "its result is no float")


def _infer(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    kind = planner.kind(eqn)
    if verdict.region == PROMOTE_REGION:
        kind = FLOAT if any(s and s.kind != HALF for s in map(planner.state, eqn.invars)) else kind
    if primitive(eqn.primitive.name).join and planner.only_half(eqn) and kind != PINNED:
        return planner.low(eqn, verdict, min(kind, HALF), f"{verdict.why}: only half is read of it")
    if eqn.params.get("out_dtype") is not None:
        return planner.full(eqn, verdict, _active(kind), "the user fixed its output dtype")
    if kind == HALF and planner.setting.recompute and primitive(eqn.primitive.name).saturating and not verdict.entry:
        return planner.full(eqn, verdict, HALF, f"{verdict.why}: half activation, exact near saturation")
    if kind == HALF and planner.asked(eqn) & HALVES:
        return planner.low(eqn, verdict, HALF, f"{verdict.why}: half activation")
    if kind == HALF:
        return planner.full(eqn, verdict, HALF, f"{verdict.why}: no path to a half operation")
    if kind == FLOAT:
        return planner.full(eqn, verdict, FLOAT, f"{verdict.why}: float32 activation")
    return planner.full(eqn, verdict, COMPUTED, f"{verdict.why}: parameters and inputs only")


def _wide(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    kinds = [state.kind for state in map(planner.seen, eqn.invars) if state is not None]
    kind = max(kinds, default=COMPUTED)
    if kind == INPUT:
        kind = COMPUTED
    if kind == PINNED:
        kind = FLOAT
    operand = eqn.invars[0]
    exact = isinstance(operand, compat.Literal) and exact_in_half(operand, planner.setting.half)
    if exact and planner.only_half(eqn):
        return planner.low(eqn, verdict, kind, "a constant that half holds exactly")
    return planner.full(eqn, verdict, kind, f"{verdict.why}: its derivative is a sum")


def _move(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    moved = [v for v in eqn.invars if tracked(v)]
    outs = [v for v in eqn.outvars if tracked(v)]
    if len(moved) != 1 and len(moved) != len(outs):
        return _deny(planner, eqn, verdict)
    states = [
        planner.moved(v, out) for v, out in zip(moved * len(outs) if len(moved) == 1 else moved, outs, strict=True)
    ]
    if len(moved) == 1 and len({s.slot for s in states}) > 1:
        states = [State(s.kind, FULL) for s in states]
    slots = iter([states[0].slot] if len(moved) == 1 and states else [s.slot for s in states] or [FULL])
    reads = tuple(planner.read(v, next(slots)) if tracked(v) else RAW for v in eqn.invars)
    kinds = iter(states)
    out_states = tuple(next(kinds) if tracked(v) else None for v in eqn.outvars)
    low = bool(states) and states[0].slot == LOW
    return Step(eqn, BIND, reads, out_states, verdict.why, verdict, low=low)


def _convert(planner: Planner, eqn: Any, verdict: Verdict) -> Step:
    (v,), (out,) = eqn.invars, eqn.outvars
    state = planner.state(v)
    if state is None:  # into float32
        dtype = v.aval.dtype
        pinned = dtype.kind in "fcV" and verdict.region != OFF_REGION
        kind = PINNED if pinned and dtype.itemsize < 4 else made_of(eqn)
        return Step(eqn, BIND, (planner.read(v, RAW),), (State(kind, FULL),), "the user's cast", verdict)
    if tracked(out):  # only the weak type changes
        if isinstance(v, compat.Literal):
            return planner.full(eqn, verdict, state.kind, "the user's cast")
        state = planner.moved(v, out)
        low = state.slot == LOW
        return Step(eqn, ALIAS, (planner.read(v, state.slot),), (state,), "keeps its dtype", verdict, low=low)
    if out.aval.dtype == planner.setting.half and state.slot == LOW:
        return Step(eqn, ALIAS, (planner.read(v, LOW),), (None,), "the user's cast", verdict, low=True)
    return Step(eqn, BIND, (planner.read(v, FULL),), (None,), "the user's cast", verdict)


DECIDERS.update(
    {
        Op.ALLOW: _allow,
        Op.DENY: _deny,
        Op.INFER: _infer,
        Op.WIDE: _wide,
        Op.MOVE: _move,
        Op.READ: _read,
        Op.CONVERT: _convert,
        Op.OPAQUE: _opaque,
    }
)
