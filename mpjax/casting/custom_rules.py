"""Re-issuing functions with derivative rules of the user's own: the rule is kept, its inside is cast.

A rule was traced for float32 and is handed what it was traced for: values are cast at its border. What
it does inside is planned like any other program, so its matmuls run in half too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from mpjax._jaxpr import compat
from mpjax.casting.classify import Setting, tracked
from mpjax.casting.demand import LIVE, MAY_HALF, WANT_FLOAT, WANT_HALF
from mpjax.casting.entering import Call
from mpjax.casting.planning import Plan, Step, plan
from mpjax.casting.reissuing import hand_in, hand_out, program_of, take
from mpjax.casting.rewriting import REISSUE, Value, array_of, run, slot_of, value_of
from mpjax.casting.states import FLOAT, FULL, HALF, INPUT, LOW, RAW, State


def _wanted(slot: int) -> int:
    """What the border asks of a value that it will hand over in a slot."""
    return LIVE | {LOW: WANT_HALF, FULL: WANT_FLOAT, RAW: 0}[slot]


def _at(state: State | None, slot: int) -> State | None:
    """The state of an operand that was handed in in a slot."""
    return None if state is None else State(HALF if slot == LOW else state.kind, slot)


def _rule_plan(jaxpr: Any, consts: Sequence[Any], states: Sequence[Any], wanted: Any, setting: Setting) -> Plan:
    """The plan of a rule's jaxpr, whose constants are constvars or leading inputs by the JAX version."""
    leading = [State(INPUT, FULL) if tracked(v) else None for v in jaxpr.invars[: len(jaxpr.invars) - len(states)]]
    assert len(leading) in (0, len(consts)), "a rule's jaxpr takes its constants, then its operands"
    return plan(jaxpr, (*leading, *states), tuple(wanted), setting)


def _run_rule(planned: Plan, consts: Sequence[Any], values: list[Value]) -> list[Value]:
    if planned.constvars:
        return run(planned, consts, values)
    leading = [value_of(const, slot_of(state)) for const, state in zip(consts, planned.in_states, strict=False)]
    return run(planned, (), leading + values)


def _resolved(consts: Sequence[Any], env: dict[Any, Value], half: Any) -> list[Any]:
    """What a rule closes over. A value of the program around it is known there only as it was traced."""
    found = []
    for const in consts:
        value = env.get(compat.variable_of(const), const)
        found.append(array_of(value, FULL, half) if isinstance(value, list) else value)
    return found


def _zero(primal: Any) -> Any:
    if jnp.issubdtype(primal.dtype, jnp.inexact):
        return jnp.zeros_like(primal)
    return np.zeros(primal.shape, jax.dtypes.float0)


def _custom_jvp(step: Step, operands: Sequence[Value], outer: Plan, env: dict[Any, Value]) -> Sequence[Value]:
    call: Call = step.inner
    params, half = step.eqn.params, outer.setting.half
    num_consts = params["num_consts"]
    slots = [slot for _, slot in call.delivery]
    states = [_at(s, slot) for s, slot in zip(call.plan.in_states, slots, strict=True)]
    out_slots = [slot_of(state) for state in call.plan.out_states]
    body = program_of(call, params["call_jaxpr"])
    fun = jax.custom_jvp(body)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        primals, tangents = primals[num_consts:], tangents[num_consts:]
        zeros = [type(t) is SymbolicZero for t in tangents]
        jaxpr, consts, out_zeros = compat.jvp_jaxpr(params, zeros)
        moving = [i for i, zero in enumerate(zeros) if not zero]
        ins = [*range(len(primals)), *moving]
        is_float0 = [False] * len(primals) + [tangents[i].dtype == jax.dtypes.float0 for i in moving]
        in_states = [None if skip else states[num_consts + i] for i, skip in zip(ins, is_float0, strict=True)]
        in_slots = [slot_of(state) for state in in_states]
        outs = [*out_slots, *(slot for slot, zero in zip(out_slots, out_zeros, strict=True) if not zero)]
        consts = _resolved(consts, env, half)
        planned = _rule_plan(jaxpr, consts, in_states, map(_wanted, outs), call.plan.setting)
        arrays = [*primals, *(tangents[i] for i in moving)]
        values = [value_of(a, slot) for a, slot in zip(arrays, in_slots, strict=True)]
        results = _run_rule(planned, consts, values)
        arrays = [_out(r, v, slot, half) for r, v, slot in zip(results, planned.outvars, outs, strict=True)]
        out, moved = arrays[: len(out_slots)], iter(arrays[len(out_slots) :])
        dots = [_zero(p) if zero else next(moved) for p, zero in zip(out, out_zeros, strict=True)]
        return tuple(out), tuple(dots)

    fun.defjvp(rule, symbolic_zeros=params["symbolic_zeros"])
    return take(fun(*hand_in(call.delivery, operands, half)), call.plan.out_states)


def _out(value: Value, v: Any, slot: int, half: Any) -> Any:
    """An output of a rule in a slot; a tangent of an integer has none."""
    return array_of(value, slot if isinstance(value, list) else RAW, half)


def _custom_vjp(step: Step, operands: Sequence[Value], outer: Plan, env: dict[Any, Value]) -> Sequence[Value]:
    call: Call = step.inner
    params, setting = step.eqn.params, call.plan.setting
    half, num_consts, symbolic = setting.half, params["num_consts"], params["symbolic_zeros"]
    arrays = hand_in(call.delivery, operands, half)
    # JAX refuses to differentiate what a custom_vjp closes over; so it stays closed over here.
    closed, arguments = arrays[:num_consts], arrays[num_consts:]
    slots = [slot for _, slot in call.delivery]
    states = [_at(s, slot) for s, slot in zip(call.plan.in_states, slots, strict=True)]
    out_slots = [slot_of(state) for state in call.plan.out_states]
    out_dtypes = [v.aval.dtype for v in call.plan.outvars]
    body = program_of(call, params["call_jaxpr"])
    residuals: dict[str, Any] = {}

    def fun(*args: Any) -> tuple[Any, ...]:
        return body(*closed, *args)

    def fwd(*args: Any) -> tuple[Any, Any]:
        perturbed = [arg.perturbed for arg in args] if symbolic else [True] * len(args)
        args = tuple(arg.value for arg in args) if symbolic else args
        jaxpr, consts = compat.fwd_jaxpr(params, perturbed)
        consts = _resolved(consts, env, half)
        count, forwards = compat.fwd_trees(params)
        own = sum(f is None for f in forwards)
        wanted = [LIVE | MAY_HALF] * own + [_wanted(slot) for slot in out_slots]
        planned = _rule_plan(jaxpr, consts, states[num_consts:], wanted, setting)
        values = [value_of(a, slot) for a, slot in zip(args, slots[num_consts:], strict=True)]
        results = _run_rule(planned, consts, values)
        outs = [array_of(r, slot, half) for r, slot in zip(results[own:], out_slots, strict=True)]
        kept = iter(
            zip(
                hand_out(planned, results[:own], planned.out_states[:own]),
                planned.out_states[:own],
                planned.outvars[:own],
                strict=True,
            )
        )
        stored, known = [], []
        everything, invars = (*closed, *args), call.plan.invars
        for forward in forwards:
            array, state, v = next(kept) if forward is None else (everything[forward], states[forward], invars[forward])
            stored.append(array)
            known.append((state, v.aval.dtype))
        assert len(stored) == count
        residuals["known"] = known
        return tuple(outs), stored

    def bwd(stored: list[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        known = residuals["known"]
        cts = [
            (State(HALF, LOW) if slot == LOW else State(FLOAT, FULL) if slot == FULL else None, dtype)
            for slot, dtype in zip(out_slots, out_dtypes, strict=True)
        ]
        given, told = [*stored, *cotangents], [*known, *cts]
        traced = _trace_bwd(params, len(stored), given, [dtype for _, dtype in told])
        in_slots = slots[num_consts:]
        wanted = [_wanted(slot) for slot, zero in zip(in_slots, traced.zeros, strict=True) if not zero]
        in_states = [state for (state, _), array in zip(told, given, strict=True) if not _is_zero(array)]
        planned = plan(traced.jaxpr, tuple(in_states), tuple(wanted), setting)
        values = [
            value_of(a, slot_of(s)) for a, s in zip((a for a in given if not _is_zero(a)), in_states, strict=True)
        ]
        consts = _resolved(compat.open_jaxpr(traced.jaxpr).consts, env, half)
        results = iter(run(planned, consts, values))
        return tuple(
            None if zero else _out(next(results), None, slot, half)
            for slot, zero in zip(in_slots, traced.zeros, strict=True)
        )

    rewritten = jax.custom_vjp(fun)
    rewritten.defvjp(fwd, bwd, symbolic_zeros=symbolic)
    return take(rewritten(*arguments), call.plan.out_states)


class _TracedRule:
    """A backward rule as a jaxpr, and which cotangents it says are zero."""

    def __init__(self, jaxpr: Any, zeros: Sequence[bool]):
        self.jaxpr, self.zeros = jaxpr, zeros


def _is_zero(array: Any) -> bool:
    return type(array) is SymbolicZero


def _trace_bwd(params: dict[str, Any], num_residuals: int, given: Sequence[Any], dtypes: Sequence[Any]) -> _TracedRule:
    """Traces the user's backward rule at the dtypes that it was written for."""
    zeros: list[bool] = []

    def rule(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        args = [
            SymbolicZero(x.aval.update(dtype=dtype)) if _is_zero(x) else next(rest)
            for x, dtype in zip(given, dtypes, strict=True)
        ]
        cts = compat.call_bwd(params, args[:num_residuals], args[num_residuals:])
        zeros.extend(ct is None or _is_zero(ct) for ct in cts)
        return [ct for ct in cts if not (ct is None or _is_zero(ct))]

    examples = [compat.retyped(x, dtype) for x, dtype in zip(given, dtypes, strict=True) if not _is_zero(x)]
    jaxpr = compat.trace(rule, *examples)
    return _TracedRule(jaxpr, tuple(zeros))


REISSUE.update({"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp})
