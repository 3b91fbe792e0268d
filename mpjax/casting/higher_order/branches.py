"""`cond`, `switch` and `platform_dependent`: branches that agree on their outputs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from mpjax.casting.classify import Listing
from mpjax.casting.higher_order.sub_jaxpr import (
    HigherOrder,
    Inner,
    all_full,
    as_traced,
    convention_of,
    enter,
    flatten_operands,
    function_of,
    operand_dtypes,
    passed_in,
)
from mpjax.casting.infer import plan_jaxpr
from mpjax.casting.inference import Inference
from mpjax.casting.lattice import FULL, HALF, TRACED, Inferred, Level, at_boundary, join
from mpjax.casting.plan import Plan, Step
from mpjax.casting.rewrite import values_of
from mpjax.casting.setting import Setting
from mpjax.casting.uses import Use, uses
from mpjax.program import evaluator


def _uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    merged = [Use.NONE] * (len(eqn.invars) - 1)
    for branch in eqn.params["branches"]:
        merged = [a | b for a, b in zip(merged, uses(branch, outs, setting).inputs, strict=True)]
    return [Use.READ, *merged]


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    wanted = inference.wanted_of(eqn)
    operands = eqn.invars[1:]
    setting = inference.setting.inside(eqn, listing.region)
    plans = tuple(
        plan_jaxpr(branch, operand_dtypes(inference, operands), wanted, setting) for branch in eqn.params["branches"]
    )
    outs = [_agreed(inferred, use) for *inferred, use in zip(*(p.outs for p in plans), wanted, strict=True)]
    if all(p.unchanged for p in plans) and all_full(outs):
        return as_traced(inference, eqn, listing, outs, *plans)
    storages = [[TRACED]]
    for i, v in enumerate(operands):
        mask = functools.reduce(operator.or_, (p.in_reads[i] for p in plans))
        storages.append([passed_in(inference.value(v), mask)])
    return enter(eqn, listing, outs, Inner(plans, convention_of(inference, eqn, storages)))


def _agreed(of_branches: Sequence[Inferred | None], use: Use) -> Inferred | None:
    """The inferred dtype of an output that all branches share, given that of each branch."""
    floats = [x for x in of_branches if x is not None]
    if not floats:
        return None
    level = floats[0].level
    for x in floats[1:]:
        level = join(level, x.level)
    if level != Level.HALF:
        return Inferred(level, FULL)
    storage = HALF if all(x.storage == HALF for x in floats) else FULL
    return at_boundary(Inferred(level, storage), use)


def _issue(step: Step, operands: Sequence[Any], plan: Plan) -> Sequence[Any]:
    inner: Inner = step.inner
    index, *arrays = flatten_operands(inner.convention, operands)
    pairs = zip(inner.plans, step.eqn.params["branches"], strict=True)
    branches = [function_of(planned, inner.convention[1:], jaxpr, step.outs, first=1) for planned, jaxpr in pairs]
    return values_of(evaluator.cond(step.eqn, index, branches, arrays), step.outs, plan.setting.half)


COND = HigherOrder(_uses, _infer, _issue)
