"""`scan` and `while`: a body that runs many times, and a carry that must keep its dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import primitive
from mpjax._jaxpr.weight_gradients import detached, lent
from mpjax.casting.classify import Listing, Setting
from mpjax.casting.higher_order.sub_jaxpr import (
    Delivery,
    HigherOrder,
    all_full,
    as_traced,
    enter,
    hand_in,
    receive,
    seen,
    storages_in,
)
from mpjax.casting.infer import Inference, plan
from mpjax.casting.lattice import FULL, HALF, Inferred, Level, carried, join, storage_of
from mpjax.casting.plan import Plan, Step
from mpjax.casting.rewrite import Environment, Value, arrays_of, run_closed, values_of
from mpjax.casting.uses import RESULT, Use, Uses, uses


@dataclasses.dataclass(slots=True)
class Loop:
    """The plan of a loop's body, the inferred dtypes of its carry, and the plan of a `while`'s condition.

    Args:
        body: The plan of the body.
        num_consts: Number of loop-invariant operands of the body.
        carry: The inferred dtypes of the carry.
        delivery: The storage dtypes of the scanned operands.
        condition: The plan of the condition of a `while`.
    """

    body: Plan
    num_consts: int
    carry: tuple[Inferred | None, ...]
    delivery: Delivery
    condition: Plan | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the sub-jaxprs."""
        return (self.body,) if self.condition is None else (self.condition, self.body)


# Backward analysis.


def _scan_body(params: dict[str, Any], outs: tuple[Use, ...], setting: Setting) -> tuple[tuple[Use, ...], Uses]:
    """The uses of a scan body's outputs at the fixed point of its carry, and the uses of the body's values."""
    num_consts, num_carry = compat.scan_split(params)
    return _uses_fixed_point(params["jaxpr"], outs, num_consts, num_carry, setting)


def _while_body(params: dict[str, Any], outs: tuple[Use, ...], setting: Setting) -> tuple[tuple[Use, ...], Uses]:
    """The same for the body of a `while`; its condition reads the carry in float32."""
    of_carry = _condition(params, setting).inputs[params["cond_nconsts"] :]
    outs = tuple(out | use for out, use in zip(outs, of_carry, strict=True))
    return _uses_fixed_point(params["body_jaxpr"], outs, params["body_nconsts"], len(outs), setting)


def _condition(params: dict[str, Any], setting: Setting) -> Uses:
    return uses(params["cond_jaxpr"], (RESULT,), setting)


def _uses_fixed_point(
    body: Any, outs: tuple[Use, ...], num_consts: int, num_carry: int, setting: Setting
) -> tuple[tuple[Use, ...], Uses]:
    wanted = outs
    while True:
        found = uses(body, wanted, setting)
        carry = found.inputs[num_consts : num_consts + num_carry]
        wider = tuple(a | b for a, b in zip(wanted, carry, strict=False)) + wanted[num_carry:]
        if wider == wanted:
            return wanted, found
        wanted = wider  # Uses only grow, so this ends.


def _scan_uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    wanted, found = _scan_body(eqn.params, outs, setting)
    num_consts, num_carry = compat.scan_split(eqn.params)
    inputs = list(found.inputs)
    for i in range(num_carry):
        inputs[num_consts + i] = inputs[num_consts + i] | wanted[i].without(Use.RETURNED)
    return inputs


def _while_uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    wanted, found = _while_body(eqn.params, outs, setting)
    consts = _condition(eqn.params, setting).inputs[: eqn.params["cond_nconsts"]]
    body = found.inputs[: eqn.params["body_nconsts"]]
    return [*consts, *body, *(use.without(Use.RETURNED) for use in wanted)]


# Forward inference.


def _infer_scan(inference: Inference, eqn: Any, listing: Listing) -> Step:
    num_consts, num_carry = compat.scan_split(eqn.params)
    split = num_consts + num_carry
    setting = inference.setting.inside(eqn, listing.region, num_consts)
    wanted, _ = _scan_body(eqn.params, inference.wanted_of(eqn), setting)
    xs = seen(inference, eqn.invars[split:])
    consts, init = eqn.invars[:num_consts], eqn.invars[num_consts:split]
    body, carry = _carry_fixed_point(inference, eqn, eqn.params["jaxpr"], consts, init, xs, wanted, setting)
    outs = [*carry, *body.outs[num_carry:]]
    if body.trivial and all_full(outs):
        return as_traced(inference, eqn, listing, outs, body)
    _read_invariants(inference, consts, body.in_reads[:num_consts], init, carry)
    delivery = []
    for i, (v, mask) in enumerate(zip(eqn.invars[split:], body.in_reads[split:], strict=True)):
        value = inference.value(v)
        # Slices of a parameter are cast in the loop, one layer at a time.
        activation = value is not None and value.level in (Level.COMPUTED, Level.HALF)
        storage = HALF if activation and mask == HALF.bit else storage_of(value)
        delivery.append((split + i, inference.read(v, storage)))
    return enter(eqn, listing, outs, Loop(body, num_consts, carry, tuple(delivery)))


def _infer_while(inference: Inference, eqn: Any, listing: Listing) -> Step:
    params = eqn.params
    num_condition, num_consts = params["cond_nconsts"], params["body_nconsts"]
    setting = inference.setting.inside(eqn, listing.region, num_consts)
    wanted, _ = _while_body(params, inference.wanted_of(eqn), setting)
    first = num_condition + num_consts
    consts, init = eqn.invars[num_condition:first], eqn.invars[first:]
    body, carry = _carry_fixed_point(inference, eqn, params["body_jaxpr"], consts, init, (), wanted, setting)
    ins = (*seen(inference, eqn.invars[:num_condition]), *carry)
    of_condition = dataclasses.replace(setting, invariants=num_condition)
    condition = plan(params["cond_jaxpr"], ins, (RESULT,), of_condition)
    if body.trivial and condition.trivial and all_full(carry):
        return as_traced(inference, eqn, listing, carry, condition, body)
    masks = (*condition.in_reads[:num_condition], *body.in_reads[:num_consts])
    _read_invariants(inference, eqn.invars[:first], masks, init, carry)
    return enter(eqn, listing, carry, Loop(body, num_consts, carry, (), condition))


def _read_invariants(
    inference: Inference,
    consts: Sequence[Any],
    masks: Sequence[int],
    init: Sequence[Any],
    carry: Sequence[Inferred | None],
) -> None:
    """Records the reads of the loop-invariant operands and of the initial carry."""
    for v, mask in zip(consts, masks, strict=True):
        for storage in storages_in(mask) or [storage_of(inference.value(v))]:
            inference.read(v, storage)
    for v, x in zip(init, carry, strict=True):
        inference.read(v, storage_of(x))


def _carry_fixed_point(
    inference: Inference,
    eqn: Any,
    body: Any,
    consts: Sequence[Any],
    init: Sequence[Any],
    xs: Sequence[Inferred | None],
    wanted: tuple[Use, ...],
    setting: Setting,
) -> tuple[Plan, tuple[Inferred | None, ...]]:
    """The plan of a loop's body at the fixed point of its carry, and the inferred dtypes of that carry."""
    jaxpr = compat.open_jaxpr(body).jaxpr
    ins = jaxpr.invars[len(consts) : len(consts) + len(init)]
    outs = jaxpr.outvars[: len(init)]
    levels: list[Level | None] = []
    for i, v in enumerate(init):
        value = inference.seen(v)
        use = inference.use(eqn.outvars[i])
        levels.append(None if value is None else _first_level(value.level, use, jaxpr, ins[i], outs[i]))
    while True:
        carry = tuple(
            None if level is None else carried(level, use) for level, use in zip(levels, wanted, strict=False)
        )
        planned = plan(jaxpr, (*seen(inference, consts), *carry, *xs), wanted, setting)
        grown = [
            None if x is None or after is None else join(x.level, after.level)
            for x, after in zip(carry, planned.outs, strict=False)
        ]
        # Levels only rise, except that `carried` lowers FLOAT if half is read. So compare its results.
        settled = all(
            level is None or carried(level, use) == x for level, x, use in zip(grown, carry, wanted, strict=False)
        )
        if settled:
            return planned, carry
        levels = grown


def _first_level(level: Level, use: Use, jaxpr: Any, before: Any, after: Any) -> Level:
    """The initial level of a carry. A sum and a state of the caller must keep float32."""
    if level == Level.ZERO and _adds_to(jaxpr, before, after):
        return Level.PINNED
    if level == Level.INPUT and use & Use.RETURNED and before is not after:
        return Level.PINNED
    return level


def _adds_to(jaxpr: Any, before: Any, after: Any) -> bool:
    """Whether `after` is `before` with something added: an accumulator."""
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def reaches(v: Any) -> bool:
        if v is before:
            return True
        eqn = None if isinstance(v, compat.Literal) else made.get(v)
        if eqn is None or not primitive(eqn.primitive.name).accumulates:
            return False
        return any(map(reaches, eqn.invars))

    return after is not before and reaches(after)


# Issuing again.


def invariant(value: Any, mask: int, half: Any) -> Callable[[], Any]:
    """Casts a loop-invariant value before the loop. Returns a function that makes the value inside the loop."""
    if not isinstance(value, Value):
        return lambda: value
    full = value[FULL]
    if not mask & HALF.bit:
        return lambda: Value(half, full=full)
    low = detached.bind(value[HALF])
    return lambda: Value(half, full=full, low=lent.bind(low, full))


def _issue_scan(step: Step, operands: Sequence[Any], plan: Plan, env: Environment) -> Sequence[Any]:
    loop: Loop = step.inner
    body, params, half = loop.body, step.eqn.params, plan.setting.half
    split, count = loop.num_consts + len(loop.carry), len(loop.carry)
    invariants = zip(operands[: loop.num_consts], body.in_reads, strict=False)
    consts = [invariant(value, mask, half) for value, mask in invariants]
    init = arrays_of(operands[loop.num_consts : split], loop.carry)
    xs = hand_in(loop.delivery, operands)

    def iteration(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        values = [make() for make in consts] + values_of(carry, loop.carry, half)
        values += receive(loop.delivery, xs, split, len(loop.delivery), half)
        outs = arrays_of(run_closed(body, params["jaxpr"], values), (*loop.carry, *body.outs[count:]))
        return outs[:count], outs[count:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(iteration, init, xs, **options)
    return values_of([*carry, *ys], step.outs, half)


def _issue_while(step: Step, operands: Sequence[Any], plan: Plan, env: Environment) -> Sequence[Any]:
    loop: Loop = step.inner
    body, condition, params, half = loop.body, loop.condition, step.eqn.params, plan.setting.half
    assert condition is not None
    first = params["cond_nconsts"]
    split = first + loop.num_consts
    masks = (*condition.in_reads[:first], *body.in_reads[: loop.num_consts])
    consts = [invariant(value, mask, half) for value, mask in zip(operands[:split], masks, strict=True)]
    init = arrays_of(operands[split:], loop.carry)

    def unfinished(carry: Sequence[Any]) -> Any:
        values = [make() for make in consts[:first]] + values_of(carry, loop.carry, half)
        (out,) = run_closed(condition, params["cond_jaxpr"], values)
        return out

    def iteration(carry: Sequence[Any]) -> Sequence[Any]:
        values = [make() for make in consts[first:]] + values_of(carry, loop.carry, half)
        return arrays_of(run_closed(body, params["body_jaxpr"], values), loop.carry)

    if not condition.outvars[0].aval.shape:
        return values_of(lax.while_loop(unfinished, iteration, init), step.outs, half)

    # Under vmap each element has its own condition. The loop runs until all elements are finished, and a finished
    # element keeps its carry.
    def masked_iteration(carry: Sequence[Any]) -> Sequence[Any]:
        going = unfinished(carry)
        return [
            lax.select(lax.broadcast_in_dim(going, new.shape, tuple(range(going.ndim))), new, old)
            for new, old in zip(iteration(carry), carry, strict=True)
        ]

    return values_of(lax.while_loop(lambda carry: unfinished(carry).any(), masked_iteration, init), step.outs, half)


SCAN = HigherOrder(_scan_uses, _infer_scan, _issue_scan, is_scan=True)
WHILE = HigherOrder(_while_uses, _infer_while, _issue_while, regions_inside=False)
