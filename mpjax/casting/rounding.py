"""Half arithmetic that rounds no result that only more arithmetic of the same kernel reads.

A region of recomputed arithmetic, and a chain of offsets and factors outside of regions, compute in float32 between the
half values that they read and those that they make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from mpjax.casting.lattice import FULL, HALF, TRACED, storage_of
from mpjax.casting.plan import Action, Plan, Step
from mpjax.casting.recompute import is_cheap
from mpjax.casting.setting import tracked
from mpjax.program.dataflow import variables
from mpjax.program.primitives import Op, primitive


class AsTraced(NamedTuple):
    """The plans of a call that runs as traced, for reports."""

    plans: tuple[Plan, ...]


def is_folded(step: Step) -> bool:
    """Whether a call may be part of a region."""
    row = primitive(step.eqn.primitive.name)
    return row.call and (row.rule or all(plan.setting.folded for plan in step.plans)) and is_cheap(step.eqn)


def without_rounding(steps: Sequence[Step], inside: Set[Any], ends_round: bool = False) -> list[Step]:
    """Steps in which arithmetic rounds none of the values `inside`, which only these steps read.

    Such values stay in the registers of a kernel, so float32 costs nothing. What leaves the steps is rounded once: by
    the region that contains them, or else by the last step itself.
    """
    unrounded: set[Any] = set()
    found = []
    for step in steps:
        if is_rounding(step):
            reads = not unrounded.isdisjoint(variables(step.eqn.invars))
            goes_on = not inside.isdisjoint(step.outvars)
            wide = (reads and goes_on) if is_move(step) else (reads or goes_on)
            ends = ends_round and not goes_on
            step = _in_float32(step, ends) if wide else step
        if step.action is Action.BIND:
            outs = zip(step.outvars, step.outs, strict=True)
            unrounded.update(v for v, x in outs if v in inside and x and x.storage == FULL)
        found.append(step)
    return found


def is_rounding(step: Step) -> bool:
    """Whether a step is arithmetic (as below), and rounds an operand or its result."""
    reads_half = step.action is Action.ENTER or primitive(step.eqn.primitive.name).compares
    read = (storage for _, storage in step.all_reads) if reads_half else ()
    return is_arithmetic(step) and (step.half or HALF in (*read, *(storage_of(x) for x in step.outs)))


def is_arithmetic(step: Step) -> bool:
    """Whether a step computes element by element, in its operands' dtype, or moves, or calls such steps and sums."""
    if step.action is Action.ENTER:
        plain = all(plan.setting.plain for plan in step.plans)  # A user's rule may match inside.
        return plain and is_folded(step) and not step.closures and _is_simple(step)
    row, listing = primitive(step.eqn.primitive.name), step.listing
    by_rule = listing.entry or listing.region
    return not by_rule and ((listing.op is Op.INFER and row.pointwise) or row.compares or is_move(step))


def reads_wide(step: Step) -> bool:
    """Whether a step reads no half array."""
    return step.action is Action.BIND and HALF not in (storage for _, storage in step.all_reads)


def is_move(step: Step) -> bool:
    """Whether a step moves elements."""
    return step.listing.op is Op.MOVE or primitive(step.eqn.primitive.name).join


def _is_simple(step: Step) -> bool:
    """Whether a step, or each of a call, computes element by element, or only moves, compares or sums."""
    if step.listing.entry or step.listing.region:
        return False
    row, inside = primitive(step.eqn.primitive.name), [each for plan in step.plans for each in plan.eqns]
    if row.call:
        return all(map(_is_simple, inside))
    moves = row.whole or is_move(step) or not variables(step.eqn.invars)
    return moves or row.pointwise or row.compares or row.risk == "sum"


def adds(step: Step) -> bool:
    """Whether a step adds, or one of a call."""
    return primitive(step.eqn.primitive.name).adds or any(adds(each) for plan in step.plans for each in plan.eqns)


def _in_float32(step: Step, rounds_result: bool = False) -> Step:
    """A step in float32, whose result stays so, or is rounded."""
    plans = (dataclasses.replace(plan, eqns=[*map(_in_float32, plan.eqns)]) for plan in step.plans)
    return dataclasses.replace(
        step,
        action=Action.BIND if step.plans else step.action,
        inner=AsTraced(tuple(plans)) if step.plans else None,
        reads=tuple(FULL if tracked(v) else TRACED for v in step.eqn.invars),
        outs=step.outs if rounds_result else tuple(x and x._replace(storage=FULL) for x in step.outs),
        why=f"{step.why}, rounded when it is stored" if is_rounding(step) and not rounds_result else step.why,
        half=False, broadcast=(), rounded_once=rounds_result,
        all_reads=tuple((v, FULL if read == HALF else read) for v, read in step.all_reads),
    )  # fmt: skip
