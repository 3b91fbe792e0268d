"""`scan` and `while`: a body that runs many times, and a carry that must keep its dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any

from mpjax.casting.classify import Listing
from mpjax.casting.higher_order.sub_jaxpr import (
    Convention,
    HigherOrder,
    all_full,
    as_traced,
    enter,
    flatten_operands,
    operand_dtypes,
    storages_in,
    unflatten_operands,
)
from mpjax.casting.infer import plan_jaxpr
from mpjax.casting.inference import Inference
from mpjax.casting.lattice import FULL, HALF, STREAM, Inferred, Level, carried, join, storage_of
from mpjax.casting.plan import Plan, Step
from mpjax.casting.rewrite import MixedValue, arrays_of, run_closed, values_of
from mpjax.casting.setting import Setting
from mpjax.casting.streams import has_matmuls
from mpjax.casting.updates import Added, added_to, is_gated, is_one_map, is_recurrence
from mpjax.casting.uses import RESULT, Use, Uses, uses
from mpjax.kernels.weight_gradients import detached, straight_through
from mpjax.program import contexts, evaluator
from mpjax.program.graph import SubJaxpr, sub_jaxprs


@dataclasses.dataclass(slots=True)
class Loop:
    """The plan of a loop's body, the inferred dtypes of its carry, and the plan of a `while`'s condition.

    Args:
        body: The plan of the body.
        carry: The inferred dtypes of the carry.
        convention: The storage dtypes of the scanned operands.
        condition: The plan of the condition of a `while`.
    """

    body: Plan
    carry: tuple[Inferred | None, ...]
    convention: Convention
    condition: Plan | None = None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of the sub-jaxprs."""
        return (self.body,) if self.condition is None else (self.condition, self.body)


# Backward analysis.


def _condition_and_body(eqn: Any) -> tuple[SubJaxpr | None, SubJaxpr]:
    *conditions, body = sub_jaxprs(eqn)
    return (conditions[0] if conditions else None), body


def _uses_of_condition(condition: SubJaxpr | None, setting: Setting) -> tuple[Use, ...]:
    return () if condition is None else uses(condition.jaxpr, (RESULT,), setting).inputs


def _uses_fixed_point(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> tuple[tuple[Use, ...], Uses]:
    """The uses of a body's outputs at the fixed point of its carry, and the uses of the body's values."""
    condition, body = _condition_and_body(eqn)
    if condition is not None:  # It reads the carry in float32.
        of_carry = _uses_of_condition(condition, setting)[condition.consts :]
        outs = tuple(out | use for out, use in zip(outs, of_carry, strict=True))
    # The steps of an update are rounded as little as what they update.
    updated = {i for i in range(body.carry) if added_to(body, i) and (setting.wide_stream or is_one_map(body, i))}

    # What a gate multiplies decays: its last value, if it is read, would show the roundings of the last steps.
    always = {i for i in updated if not is_gated(body, i)}

    def unrounded(wanted: Sequence[Use], which: Container[int]) -> tuple[Use, ...]:
        return tuple(use | Use.AMPLIFIED if i in which and use else use for i, use in enumerate(wanted))

    wanted = unrounded(outs, updated)
    end = body.consts + body.carry
    while True:
        of_body = uses(body.jaxpr, wanted, setting)
        carry = of_body.inputs[body.consts : end]
        wider = unrounded([*(a | b for a, b in zip(wanted, carry, strict=False)), *wanted[body.carry :]], always)
        if wider == wanted:
            return wanted, of_body
        wanted = wider  # Uses only grow, so this ends.


def _of_steps(setting: Setting, body: SubJaxpr) -> Setting:
    """The setting of a loop's body: whether its iterations are steps of one map."""
    steps = any(added_to(body, i) and is_one_map(body, i) for i in range(body.carry))
    return setting if steps == setting.steps else dataclasses.replace(setting, steps=steps)


def _uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    condition, body = _condition_and_body(eqn)
    setting = _of_steps(setting, body)
    wanted, of_body = _uses_fixed_point(eqn, outs, setting)
    consts = _uses_of_condition(condition, setting)[: condition.consts] if condition else ()
    inputs = list(of_body.inputs)
    for i, use in enumerate(wanted[: body.carry], body.consts):
        inputs[i] = use.without(Use.RETURNED) | (inputs[i] if condition is None else Use.NONE)
    return [*consts, *inputs]


# Forward inference.


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    condition, body = _condition_and_body(eqn)
    consts, init, scanned = body.split(eqn.invars)
    setting = _of_steps(inference.setting.inside(eqn, listing.region, body.consts), body)
    wanted, _ = _uses_fixed_point(eqn, inference.wanted_of(eqn), setting)
    planned, carry = _carry_fixed_point(inference, eqn, body, operand_dtypes(inference, scanned), wanted, setting)
    outs = [*carry, *planned.outs[body.carry :]]
    plans, masks, of_condition = [planned], planned.in_reads[: body.consts], None
    if condition is not None:
        first, _, _ = condition.split(eqn.invars)
        inside = dataclasses.replace(setting, invariants=condition.consts)
        of_condition = plan_jaxpr(condition.jaxpr, (*operand_dtypes(inference, first), *carry), (RESULT,), inside)
        plans, masks = [of_condition, planned], (*of_condition.in_reads[: condition.consts], *masks)
        consts = first + consts
    if all(p.unchanged for p in plans) and all_full(outs):
        return as_traced(inference, eqn, listing, outs, *plans)
    _read_invariants(inference, consts, masks, init, carry)
    convention, end = [], body.consts + body.carry
    for i, (v, mask) in enumerate(zip(scanned, planned.in_reads[end:], strict=True), end):
        value = inference.operand(v)
        # Slices of a parameter are cast in the loop, one layer at a time.
        activation = value is not None and Level.COMPUTED <= value.level <= Level.HALF
        storage = HALF if activation and mask == HALF.bit else storage_of(value)
        convention.append((i, inference.read(v, storage)))
    return enter(eqn, listing, outs, Loop(planned, carry, tuple(convention), of_condition))


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
    body: SubJaxpr,
    xs: Sequence[Inferred | None],
    wanted: tuple[Use, ...],
    setting: Setting,
) -> tuple[Plan, tuple[Inferred | None, ...]]:
    """The plan of a loop's body at the fixed point of its carry, and the inferred dtypes of that carry."""
    consts, init, _ = body.split(eqn.invars)
    jaxpr = body.opened
    levels: list[Level | None] = []
    streams: set[int] = set()
    for i, v in enumerate(init):
        value = inference.operand(v)
        keeps = value is not None and _keeps_float32(value.level, inference.use(eqn.outvars[i]), body, i, setting)
        if value is not None and not keeps and _is_stream(body, i, setting):
            streams.add(i)
        levels.append(Level.PINNED if keeps else value and value.level)
    # What is added to a sum is rounded as little as the sum.
    sums = {i for i, level in enumerate(levels) if level == Level.PINNED}
    wanted = tuple(use | Use.SUMMED if i in sums else use for i, use in enumerate(wanted))
    gated = {i for i in sums if wanted[i] & Use.ANY_HALF and is_gated(body, i)}

    def carry_of(i: int, level: Level | None) -> Inferred | None:
        if level is None:
            return None
        if i in gated:
            return Inferred(Level.PINNED, FULL, gated=True)
        return STREAM if i in streams else carried(level, wanted[i])

    while True:
        carry = tuple(map(carry_of, range(len(levels)), levels))
        planned = plan_jaxpr(jaxpr, (*operand_dtypes(inference, consts), *carry, *xs), wanted, setting)
        grown = [
            None if x is None or after is None else join(x.level, after.level)
            for x, after in zip(carry, planned.outs, strict=False)
        ]
        # Levels only rise, except that `carried` lowers FLOAT if half is read. So compare its results.
        if carry == tuple(map(carry_of, range(len(grown)), grown)):
            return planned, carry
        levels = grown


def _is_stream(body: SubJaxpr, i: int, setting: Setting) -> bool:
    """Whether a carry is the residual stream of a `scan` over layers, and float32."""
    return bool(added_to(body, i)) and setting.wide_stream and has_matmuls(body.jaxpr) and not is_one_map(body, i)


def _keeps_float32(level: Level, use: Use, body: SubJaxpr, i: int, setting: Setting) -> bool:
    """Whether a carry must keep float32: a state of the caller, a sum, or what the iterations update.

    Args:
        level: The level of its initial value.
        use: The uses of its last value.
        body: The loop's body.
        i: Its index in the carry.
        setting: The setting of the body.
    """
    if (level == Level.INPUT and use & Use.RETURNED) or (setting.keeps_carries and level <= Level.COMPUTED):
        return body.opened.invars[body.consts + i] is not body.opened.outvars[i]
    added = added_to(body, i)
    if level == Level.ZERO or (level <= Level.COMPUTED and added == Added.STEP):
        return bool(added)
    return is_recurrence(body, i) or (bool(added) and is_one_map(body, i))


# Issuing again.


def invariant(value: Any, mask: int, half: Any) -> Callable[[], Any]:
    """Casts a loop-invariant value before the loop. Returns a function that makes the value inside the loop."""
    if not isinstance(value, MixedValue):
        return lambda: value
    full = value[FULL]
    if not mask & HALF.bit:
        return lambda: MixedValue(half, full=full)
    low = detached.bind(value[HALF])
    return lambda: MixedValue(half, full=full, low=straight_through.bind(low, full), in_loop=True)


def _issue(step: Step, operands: Sequence[Any], plan: Plan) -> Sequence[Any]:
    loop: Loop = step.inner
    eqn, planned, half = step.eqn, loop.body, plan.setting.half
    condition, body = _condition_and_body(eqn)
    read = _invariants(loop.condition, condition.split(operands)[0]) if condition and loop.condition else []
    consts, init, _ = body.split(operands)
    invariants = _invariants(planned, consts)
    carry = arrays_of(init, loop.carry)

    def iteration(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = [make() for make in invariants] + values_of(carry, loop.carry, half)
        values += unflatten_operands(loop.convention, xs, len(values), len(loop.convention), half)
        outs = arrays_of(run_closed(planned, body.jaxpr, values), (*loop.carry, *planned.outs[body.carry :]))
        return outs[: body.carry], outs[body.carry :]

    if condition is None or loop.condition is None:
        trial = contexts.trial.value
        if trial is not None and trial.checkpoint:
            iteration = trial.checkpointed(iteration)
        carry, ys = evaluator.scan(eqn, iteration, carry, flatten_operands(loop.convention, operands))
        return values_of([*carry, *ys], step.outs, half)
    of_condition = loop.condition

    def unfinished(carry: Sequence[Any]) -> Any:
        values = [make() for make in read] + values_of(carry, loop.carry, half)
        return run_closed(of_condition, condition.jaxpr, values)[0]

    carry, _ = evaluator.while_loop(eqn, unfinished, lambda carry, _: (iteration(carry, ())[0], None), carry)
    return values_of(carry, step.outs, half)


def _invariants(planned: Plan, values: Sequence[Any]) -> list[Callable[[], Any]]:
    return [invariant(x, mask, planned.setting.half) for x, mask in zip(values, planned.in_reads, strict=False)]


SCAN = HigherOrder(_uses, _infer, _issue, is_scan=True)
WHILE = HigherOrder(_uses, _infer, _issue, regions_inside=False)
