"""`shard_map`: one sub-jaxpr that runs on every device, on that device's shards of the operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mpjax._jaxpr import compat
from mpjax.casting.classify import Listing, Setting
from mpjax.casting.higher_order.sub_jaxpr import (
    Call,
    HigherOrder,
    as_traced,
    convention_of,
    enter,
    flatten_operands,
    function_of,
    plan_call,
)
from mpjax.casting.infer import Inference
from mpjax.casting.lattice import FULL, HALF, TRACED, Level
from mpjax.casting.plan import Plan, Step
from mpjax.casting.rewrite import Environment, values_of
from mpjax.casting.uses import Use, uses


def _uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    with compat.on_its_devices(eqn.params):  # The derivative rules inside are traced here.
        return uses(compat.call_jaxpr(eqn.params), outs, setting).inputs


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    with compat.on_its_devices(eqn.params):
        inner = plan_call(inference, eqn, listing, compat.call_jaxpr(eqn.params))
    if inner.unchanged:
        return as_traced(inference, eqn, listing, inner.outs, inner)
    in_specs, _ = compat.shard_map_specs(eqn.params)
    axes = compat.shard_map_options(eqn.params)["axis_names"]
    storages = []
    for v, mask, spec in zip(eqn.invars, inner.in_reads, in_specs, strict=True):
        value = inference.value(v)
        if value is None:
            storage = TRACED
        elif not axes <= compat.axes_of_spec(spec):
            storage = FULL  # Replicated: its cotangents are summed over the devices.
        elif value.level != Level.INPUT and mask == HALF.bit:
            storage = HALF
        else:
            storage = value.storage
        storages.append([storage])
    return enter(eqn, listing, inner.outs, Call(inner, convention_of(inference, eqn, storages)))


def _issue(step: Step, operands: Sequence[Any], plan: Plan, env: Environment) -> Sequence[Any]:
    call: Call = step.inner
    params = step.eqn.params
    in_specs, out_specs = compat.shard_map_specs(params)
    mapped = jax.shard_map(
        function_of(call.plan, call.convention, compat.call_jaxpr(params)),
        in_specs=tuple(in_specs[i] for i, _ in call.convention),
        out_specs=out_specs,
        **compat.shard_map_options(params),
    )
    return values_of(mapped(*flatten_operands(call.convention, operands)), call.plan.outs, plan.setting.half)


SHARD_MAP = HigherOrder(_uses, _infer, _issue)
