"""`jit`, calls, calls with metadata and `remat`: one sub-jaxpr that runs once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from mpjax._jaxpr import compat
from mpjax.casting.classify import Listing, Setting
from mpjax.casting.higher_order.sub_jaxpr import (
    Call,
    HigherOrder,
    as_traced,
    cached_function,
    convention_of,
    enter,
    flatten_operands,
    function_of,
    plan_call,
    storages_in,
)
from mpjax.casting.infer import Inference
from mpjax.casting.lattice import FULL, HALF, Level, storage_of
from mpjax.casting.plan import Plan, Step
from mpjax.casting.remat import is_cheap
from mpjax.casting.rewrite import Environment, values_of
from mpjax.casting.uses import Use, follows_one_value, uses


def uses_of_call(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    """The uses of a call's operands."""
    found = uses(compat.call_jaxpr(eqn.params), outs, setting).inputs
    if len(outs) == 1 and outs[0] & Use.HALF and follows_one_value(eqn):
        # A function of one activation, such as silu: its operand is half too, if nothing inside needs float32.
        return [use | Use.HALF if use & Use.MAY_HALF and not use & Use.FLOAT else use for use in found]
    return found


def _infer_jit(inference: Inference, eqn: Any, listing: Listing) -> Step:
    setting = inference.setting.inside(eqn, listing.region)
    if setting.recompute and is_cheap(eqn):
        setting = dataclasses.replace(setting, folded=True)
    inner = plan_call(inference, eqn, listing, compat.call_jaxpr(eqn.params), setting)
    if inner.unchanged:
        return as_traced(inference, eqn, listing, inner.outs, inner)
    donated = eqn.params.get("donated_invars") or (False,) * len(eqn.invars)
    storages = []
    for v, mask, is_donated in zip(eqn.invars, inner.in_reads, donated, strict=True):
        value = inference.value(v)
        stored = storage_of(value)
        # A parameter that is read in both dtypes is cast inside, because the function is traced once for all calls.
        is_parameter = value is not None and value.level == Level.INPUT and mask & FULL.bit
        given = is_donated or stored != FULL or not mask or is_parameter
        storages.append([stored] if given else storages_in(mask))
    return enter(eqn, listing, inner.outs, Call(inner, convention_of(inference, eqn, storages)))


def _issue_jit(step: Step, operands: Sequence[Any], plan: Plan, env: Environment) -> Sequence[Any]:
    call: Call = step.inner
    params, jaxpr, half = step.eqn.params, compat.call_jaxpr(step.eqn.params), plan.setting.half
    arrays = flatten_operands(call.convention, operands)
    options = compat.jit_options(params) or {}
    shardings = tuple(params["in_shardings"]), tuple(params["out_shardings"])
    donated = tuple(n for n, (i, _) in enumerate(call.convention) if params["donated_invars"][i])
    key = ("jit", call.convention, params["name"], *shardings, donated, repr(options))

    def make() -> Any:
        body = function_of(call.plan, call.convention, jaxpr)
        body.__name__ = body.__qualname__ = params["name"]
        ins, outs = [shardings[0][i] for i, _ in call.convention], shardings[1]
        if not all(map(compat.is_unspecified, ins)):
            options["in_shardings"] = tuple(None if compat.is_unspecified(s) else s for s in ins)
        if not all(map(compat.is_unspecified, outs)):
            options["out_shardings"] = tuple(None if compat.is_unspecified(s) else s for s in outs)
        return jax.jit(body, donate_argnums=donated or None, **options)

    return values_of(cached_function(call.plan, key, make)(*arrays), call.plan.outs, half)


def _call(wrap: Callable[[Callable[..., Any], dict[str, Any]], Callable[..., Any]]) -> HigherOrder:
    """The rules of a primitive that calls one sub-jaxpr; `wrap(function, params)` makes the call that is issued."""

    def issue(step: Step, operands: Sequence[Any], plan: Plan, env: Environment) -> Sequence[Any]:
        call: Call = step.inner
        body = function_of(call.plan, call.convention, compat.call_jaxpr(step.eqn.params))
        outs = wrap(body, step.eqn.params)(*flatten_operands(call.convention, operands))
        return values_of(outs, call.plan.outs, plan.setting.half)

    return HigherOrder(uses_of_call, _infer_jit, issue)


def _infer_remat(inference: Inference, eqn: Any, listing: Listing) -> Step:
    inner = plan_call(inference, eqn, listing, compat.call_jaxpr(eqn.params))
    if inner.unchanged:
        return as_traced(inference, eqn, listing, inner.outs, inner)
    storages = []
    for v, mask in zip(eqn.invars, inner.in_reads, strict=True):
        value = inference.value(v)
        # Inputs are stored until the backward pass. A parameter is stored anyway, so its cast stays inside. An
        # activation that is only read in half is cast before, so that half is stored.
        only_half = value is not None and value.storage == FULL and mask == HALF.bit
        activation = value is not None and value.level not in (Level.INPUT, Level.PINNED)
        storages.append([HALF if only_half and activation else storage_of(value)])
    return enter(eqn, listing, inner.outs, Call(inner, convention_of(inference, eqn, storages)))


def _issue_remat(step: Step, operands: Sequence[Any], plan: Plan, env: Environment) -> Sequence[Any]:
    call: Call = step.inner
    params, jaxpr, half = step.eqn.params, compat.call_jaxpr(step.eqn.params), plan.setting.half
    arrays = flatten_operands(call.convention, operands)
    of_operands = compat.barriers(params, len(operands))
    barriers = tuple(of_operands[i] for i, _ in call.convention)
    if params["differentiated"]:
        # This is already the backward pass of a remat. Only the barrier remains, which keeps the compiler from
        # sharing the recomputed values with the forward pass.
        behind = iter(lax.optimization_barrier([x for x, barrier in zip(arrays, barriers, strict=True) if barrier]))
        arrays = [next(behind) if barrier else x for x, barrier in zip(arrays, barriers, strict=True)]
        return values_of(function_of(call.plan, call.convention, jaxpr)(*arrays), call.plan.outs, half)
    flags: bool | tuple[bool, ...] = barriers[0] if len(set(barriers)) == 1 else barriers
    key = ("remat", call.convention, flags, params["policy"])

    def make() -> Any:
        body = function_of(call.plan, call.convention, jaxpr)
        return jax.checkpoint(body, prevent_cse=flags, policy=params["policy"])

    return values_of(cached_function(call.plan, key, make)(*arrays), call.plan.outs, half)


def _uses_of_remat(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    return uses(compat.call_jaxpr(eqn.params), outs, setting).inputs


_INLINED = _call(lambda fun, params: fun)

CALLS = {
    "jit": HigherOrder(uses_of_call, _infer_jit, _issue_jit),
    "call": _INLINED,
    "closed_call": _INLINED,
    "eval_jaxpr": _INLINED,  # the name of `closed_call` since JAX 0.12
    "xla_metadata_call": _call(compat.with_metadata),
    "composite": _call(compat.as_composite),
    "remat2": HigherOrder(_uses_of_remat, _infer_remat, _issue_remat, regions_inside=False),
}
