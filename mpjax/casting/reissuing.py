"""Re-issuing equations with programs inside through JAX's public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from mpjax._jaxpr import compat
from mpjax.casting.demand import call_jaxpr
from mpjax.casting.entering import Branches, Call, Delivery, Loop
from mpjax.casting.planning import Plan, Step
from mpjax.casting.rewriting import REISSUE, Value, array_of, run_closed, slot_of, value_of
from mpjax.casting.states import FULL, LOW, RAW


def hand_in(delivery: Delivery, operands: Sequence[Value], half: Any) -> list[Any]:
    """The arrays that go into a program inside."""
    return [array_of(operands[i], slot, half) for i, slot in delivery]


def receive(delivery: Delivery, arrays: Sequence[Any], first: int, count: int) -> list[Value]:
    """The values that the program inside makes of them; an operand may have come in both dtypes."""
    values: list[Value] = [None] * count
    for (i, slot), array in zip(delivery, arrays, strict=True):
        i -= first
        if slot == RAW:
            values[i] = array
        elif values[i] is None:
            values[i] = value_of(array, slot)
        else:
            values[i][slot] = array
    return values


def hand_out(plan: Plan, outs: Sequence[Value], states: Sequence[Any] | None = None) -> list[Any]:
    """The arrays of a program's outputs, in the slots that its plan (or `states`) gives them."""
    states = plan.out_states if states is None else states
    return [array_of(out, slot_of(state), plan.setting.half) for out, state in zip(outs, states, strict=True)]


def take(arrays: Sequence[Any], states: Sequence[Any]) -> list[Value]:
    """The values that came out of a program inside."""
    return [value_of(array, slot_of(state)) for array, state in zip(arrays, states, strict=True)]


def program_of(call: Call, jaxpr: Any) -> Any:
    """The program inside as a function of the arrays handed in."""

    def body(*arrays: Any) -> tuple[Any, ...]:
        values = receive(call.delivery, arrays, 0, len(call.plan.invars))
        return tuple(hand_out(call.plan, run_closed(call.plan, jaxpr, values)))

    return body


def _kept(plan: Plan, key: Any, make: Any) -> Any:
    """Makes a function once per plan, so that JAX's caches, which go by identity, hit."""
    try:
        if key not in plan.runners:
            plan.runners[key] = make()
        return plan.runners[key]
    except TypeError:  # an unhashable parameter
        return make()


def _jit(step: Step, operands: Sequence[Value], plan: Plan, env: Any) -> Sequence[Value]:
    call: Call = step.inner
    params, jaxpr = step.eqn.params, call_jaxpr(step.eqn.params)
    arrays = hand_in(call.delivery, operands, plan.setting.half)
    if "in_shardings" not in params:  # a call primitive
        return take(program_of(call, jaxpr)(*arrays), call.plan.out_states)
    options = compat.jit_options(params) or {}
    key = (
        "jit",
        call.delivery,
        params["name"],
        tuple(params["in_shardings"]),
        tuple(params["out_shardings"]),
        tuple(params["donated_invars"]),
        repr(options),
    )

    def make() -> Any:
        body = program_of(call, jaxpr)
        body.__name__ = body.__qualname__ = params["name"]
        ins = [params["in_shardings"][i] for i, _ in call.delivery]
        outs = params["out_shardings"]
        if not all(map(compat.is_unspecified, ins)):
            options["in_shardings"] = tuple(None if compat.is_unspecified(s) else s for s in ins)
        if not all(map(compat.is_unspecified, outs)):
            options["out_shardings"] = tuple(None if compat.is_unspecified(s) else s for s in outs)
        donated = tuple(n for n, (i, _) in enumerate(call.delivery) if params["donated_invars"][i])
        return jax.jit(body, donate_argnums=donated or None, **options)

    return take(_kept(call.plan, key, make)(*arrays), call.plan.out_states)


def _remat(step: Step, operands: Sequence[Value], plan: Plan, env: Any) -> Sequence[Value]:
    call: Call = step.inner
    params, jaxpr = step.eqn.params, call_jaxpr(step.eqn.params)
    arrays = hand_in(call.delivery, operands, plan.setting.half)
    of_operands = compat.barriers(params, len(operands))
    barriers = tuple(of_operands[i] for i, _ in call.delivery)
    if params["differentiated"]:
        # It is the backward pass of a remat already. What is left of it is the barrier that keeps
        # the compiler from sharing the recomputed values with the forward pass.
        kept = iter(lax.optimization_barrier([x for x, barrier in zip(arrays, barriers, strict=True) if barrier]))
        arrays = [next(kept) if barrier else x for x, barrier in zip(arrays, barriers, strict=True)]
        return take(program_of(call, jaxpr)(*arrays), call.plan.out_states)
    key = ("remat", call.delivery, barriers, params["policy"])

    def make() -> Any:
        return jax.checkpoint(program_of(call, jaxpr), prevent_cse=barriers, policy=params["policy"])

    return take(_kept(call.plan, key, make)(*arrays), call.plan.out_states)


def _cond(step: Step, operands: Sequence[Value], plan: Plan, env: Any) -> Sequence[Value]:
    inner: Branches = step.inner
    index, *arrays = hand_in(inner.delivery, operands, plan.setting.half)

    def branch(planned: Plan, jaxpr: Any) -> Any:
        def body(*arrays: Any) -> tuple[Any, ...]:
            values = receive(inner.delivery[1:], arrays, 1, len(planned.invars))
            return tuple(hand_out(planned, run_closed(planned, jaxpr, values), step.outs))

        return body

    branches = [branch(*pair) for pair in zip(inner.plans, step.eqn.params["branches"], strict=True)]
    return take(lax.switch(index, branches, *arrays), step.outs)


@jax.custom_jvp
def _lend(master: Any, copy: Any) -> Any:
    """The copy of a loop-invariant value in another dtype, whose gradient belongs to the master.

    So the cast is made once, before the loop, and yet the gradients of all turns are added up in the
    master's float32.
    """
    return copy


@_lend.defjvp
def _lend_jvp(primals: Any, tangents: Any) -> Any:
    copy = primals[1]
    return copy, lax.convert_element_type(tangents[0], copy.dtype)


def _invariant(value: Value, mask: int, half: Any) -> Any:
    """Makes the casts of a loop-invariant value before the loop; returns what makes its value inside."""
    if not isinstance(value, list):
        return lambda: value
    low = array_of(value, LOW, half) if mask & 1 << LOW else None
    full = array_of(value, FULL, half)
    if low is None:
        return lambda: [full, None]
    low = lax.stop_gradient(low)
    return lambda: [full, _lend(full, low)]


def _scan(step: Step, operands: Sequence[Value], plan: Plan, env: Any) -> Sequence[Value]:
    loop: Loop = step.inner
    body, params, half = loop.body, step.eqn.params, plan.setting.half
    split = loop.num_consts + len(loop.carry)
    consts = [
        _invariant(value, mask, half) for value, mask in zip(operands[: loop.num_consts], body.in_reads, strict=False)
    ]
    carried = operands[loop.num_consts : split]
    init = [array_of(v, slot_of(state), half) for v, state in zip(carried, loop.carry, strict=True)]
    xs = hand_in(loop.delivery, operands, half)
    ys_states = body.out_states[len(loop.carry) :]

    def turn(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        values = [make() for make in consts] + take(carry, loop.carry)
        values += receive(loop.delivery, xs, split, len(loop.delivery))
        outs = hand_out(body, run_closed(body, params["jaxpr"], values), (*loop.carry, *ys_states))
        return outs[: len(loop.carry)], outs[len(loop.carry) :]

    carry, ys = lax.scan(turn, init, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
    return take([*carry, *ys], step.outs)


def _while(step: Step, operands: Sequence[Value], plan: Plan, env: Any) -> Sequence[Value]:
    loop: Loop = step.inner
    body, condition, params, half = loop.body, loop.condition, step.eqn.params, plan.setting.half
    assert condition is not None
    first = params["cond_nconsts"]
    split = first + loop.num_consts
    masks = (*condition.in_reads[:first], *body.in_reads[: loop.num_consts])
    consts = [_invariant(value, mask, half) for value, mask in zip(operands[:split], masks, strict=True)]
    init = [array_of(v, slot_of(state), half) for v, state in zip(operands[split:], loop.carry, strict=True)]

    def unfinished(carry: Sequence[Any]) -> Any:
        values = [make() for make in consts[:first]] + take(carry, loop.carry)
        (out,) = run_closed(condition, params["cond_jaxpr"], values)
        return out

    def turn(carry: Sequence[Any]) -> Sequence[Any]:
        values = [make() for make in consts[first:]] + take(carry, loop.carry)
        return hand_out(body, run_closed(body, params["body_jaxpr"], values), loop.carry)

    if not condition.outvars[0].aval.shape:
        return take(lax.while_loop(unfinished, turn, init), step.outs)

    # Under vmap each element has a condition of its own: the loop goes on while any is unfinished,
    # and those that are finished keep their carry.
    def masked_turn(carry: Sequence[Any]) -> Sequence[Any]:
        going = unfinished(carry)
        return [
            lax.select(lax.broadcast_in_dim(going, new.shape, tuple(range(going.ndim))), new, old)
            for new, old in zip(turn(carry), carry, strict=True)
        ]

    return take(lax.while_loop(lambda carry: unfinished(carry).any(), masked_turn, init), step.outs)


def _shard_map(step: Step, operands: Sequence[Value], plan: Plan, env: Any) -> Sequence[Value]:
    call: Call = step.inner
    params = step.eqn.params
    in_specs, out_specs = compat.shard_map_specs(params)
    arrays = hand_in(call.delivery, operands, plan.setting.half)
    mapped = jax.shard_map(
        program_of(call, call_jaxpr(params)),
        in_specs=tuple(in_specs[i] for i, _ in call.delivery),
        out_specs=out_specs,
        **compat.shard_map_options(params),
    )
    return take(mapped(*arrays), call.plan.out_states)


REISSUE.update(
    {
        "jit": _jit,
        "remat2": _remat,
        "cond": _cond,
        "scan": _scan,
        "while": _while,
        "shard_map": _shard_map,
    }
)
