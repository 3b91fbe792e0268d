"""Primitives with one sub-jaxpr that runs once: `jit`, calls, `remat`, `shard_map`, `custom_vmap`.

They share their backward analysis and forward inference. They differ in the storage dtypes of their operands, and in
the public function of JAX that issues them again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from mpjax.casting.checkpointed import adds_to
from mpjax.casting.classify import Listing
from mpjax.casting.higher_order.sub_jaxpr import (
    Copies,
    HigherOrder,
    Inner,
    as_traced,
    cached_function,
    convention_of,
    enter,
    flatten_operands,
    function_of,
    plan_call,
    storages_in,
)
from mpjax.casting.infer import plan_function
from mpjax.casting.inference import Inference
from mpjax.casting.lattice import FULL, HALF, TRACED, Inferred, Level, Storage, storage_of
from mpjax.casting.plan import Plan, Step
from mpjax.casting.recompute import is_cheap
from mpjax.casting.rewrite import arrays_of, kept, run_closed, values_of
from mpjax.casting.setting import Setting
from mpjax.casting.uses import Use, follows_one_value, uses
from mpjax.kernels.packed import remembering, tangent_of
from mpjax.program import compat, evaluator
from mpjax.program.formats import Format

# By name: each is issued in its own way; a test holds them against the table.

# The storage dtypes in which an operand is passed: `(equation, index, its inferred dtype, reads inside as a bit mask)`.
_Storages = Callable[[Any, int, Inferred | None, int], Sequence[Storage]]
# Issues the equation again on arrays: `(equation, call, function of the arrays, arrays) → results`.
_Issue = Callable[[Any, Inner, Callable[..., Any], Sequence[Any]], Any]


def uses_of_call(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    """The uses of a call's operands."""
    of_operands = uses(compat.call_jaxpr(eqn.params), outs, setting).inputs
    if len(outs) == 1 and outs[0] & Use.HALF and follows_one_value(eqn):
        # A function of one activation, such as silu: its operand is half too, if nothing inside needs float32.
        return [use | Use.HALF if use & Use.MAY_HALF and not use & Use.FLOAT else use for use in of_operands]
    return of_operands


def _one_sub_jaxpr(
    issue: _Issue,
    storages: _Storages,
    uses_of_operands: Callable[..., Sequence[Use]] = uses_of_call,
    inside: Callable[[dict[str, Any]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    regions_inside: bool = True,
    shares_copies: bool = False,
) -> HigherOrder:
    """The rules of a primitive with one sub-jaxpr that runs once.

    Args:
        issue: Issues the equation again.
        storages: The storage dtypes in which an operand is passed.
        uses_of_operands: Backward analysis.
        inside: `inside(params)`, the context for planning the sub-jaxpr.
        regions_inside: As in `HigherOrder`.
        shares_copies: Whether the copies of parameters with scales are made outside and passed.
    """

    def infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
        setting = inference.setting.inside(eqn, listing.region)
        if setting.rules.residuals != "full" and is_cheap(eqn):
            setting = dataclasses.replace(setting, folded=True)
        with inside(eqn.params):
            inner = plan_call(inference, eqn, listing, compat.call_jaxpr(eqn.params), setting)
        if inner.unchanged:
            return as_traced(inference, eqn, listing, inner.outs, inner)
        reads = enumerate(zip(eqn.invars, inner.in_reads, strict=True))
        passed = [storages(eqn, i, inference.value(v), mask) for i, (v, mask) in reads]
        copies = _scaled_parameters(inner) if shares_copies else ()
        return enter(eqn, listing, inner.outs, Inner((inner,), convention_of(inference, eqn, passed), copies))

    def reissue(step: Step, operands: Sequence[Any], plan: Plan) -> Sequence[Any]:
        call: Inner = step.inner
        body = function_of(call.plans[0], call.convention, compat.call_jaxpr(step.eqn.params), copies=call.copies)
        arrays = flatten_operands(call.convention, operands)
        if plan.setting.scaled is not None:
            axes = plan.setting.scaled.options.axes
            copies = [operands[i].quantised(FULL, format, format.dtype, axes) for i, format in call.copies]
            arrays += [x for copy in copies for x in (copy.q, copy.scale)]
        if step.packs and not compat.under_jet():
            outs = _issue_remembering(step, operands, body, arrays, plan)
        else:
            outs = issue(step.eqn, call, body, arrays)
        return values_of(outs, call.plans[0].outs, plan.setting.half)

    return HigherOrder(uses_of_operands, infer, reissue, regions_inside)


def _uses(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    return uses(compat.call_jaxpr(eqn.params), outs, setting).inputs


# jit and other calls.


def _storages_of_jit(eqn: Any, i: int, value: Inferred | None, mask: int) -> Sequence[Storage]:
    donated, stored = eqn.params.get("donated_invars"), storage_of(value)
    # A parameter that is read in both dtypes is cast inside, because the function is traced once for all calls.
    is_parameter = value is not None and value.level == Level.INPUT and mask & FULL.bit
    as_stored = (donated and donated[i]) or stored != FULL or not mask or is_parameter
    return [stored] if as_stored else storages_in(mask)


def _issue_jit(eqn: Any, call: Inner, body: Any, arrays: Sequence[Any]) -> Any:
    params = eqn.params
    options = compat.jit_options(params) or {}
    shardings = tuple(params["in_shardings"]), tuple(params["out_shardings"])
    donated = tuple(n for n, (i, _) in enumerate(call.convention) if params["donated_invars"][i])
    key = ("jit", call.convention, params["name"], *shardings, donated, repr(options))

    def make() -> Any:
        body.__name__ = body.__qualname__ = params["name"]
        ins, outs = [shardings[0][i] for i, _ in call.convention], shardings[1]
        if not all(map(compat.is_unspecified, ins)):
            options["in_shardings"] = tuple(None if compat.is_unspecified(s) else s for s in ins)
        if not all(map(compat.is_unspecified, outs)):
            options["out_shardings"] = tuple(None if compat.is_unspecified(s) else s for s in outs)
        return jax.jit(body, donate_argnums=donated or None, **options)

    return cached_function(call.plans[0], key, make)(*arrays)


def _call(wrap: Callable[[Callable[..., Any], dict[str, Any]], Callable[..., Any]]) -> HigherOrder:
    """The rules of a primitive that calls its sub-jaxpr; `wrap(function, params)` makes the call that is issued."""
    return _one_sub_jaxpr(lambda eqn, _, body, arrays: wrap(body, eqn.params)(*arrays), _storages_of_jit)


# remat.


def _scaled_parameters(plan: Plan) -> Copies:
    """The inputs of a plan that its matmuls read with scales as parameters. A remat would quantise them twice."""
    read: dict[tuple[Any, Format], None] = {}
    for step in plan.eqns:
        if isinstance(step, Step) and step.scaled is not None and step.is_scaled and step.scaled.format.shares_copies:
            read |= {(step.eqn.invars[i], step.scaled.format): None for i in step.parameters}
        elif isinstance(step, Step) and isinstance(step.inner, Inner):
            read |= {(step.eqn.invars[i], format): None for i, format in step.inner.copies}
    return tuple((i, format) for i, v in enumerate(plan.invars) for w, format in read if v is w)


def _storages_of_remat(eqn: Any, i: int, value: Inferred | None, mask: int) -> Sequence[Storage]:
    # Inputs are stored until the backward pass. A parameter is stored anyway, so its cast stays inside. An activation
    # that is only read in half is cast before, so that half is stored. What a stream inside adds to is read in float32,
    # and its half copy is stored: see `packing`.
    only_half = value is not None and value.storage == FULL and (mask == HALF.bit or value.copied)
    only_half = only_half and not (mask & FULL.bit and adds_to(eqn, i))
    activation = value is not None and value.level not in (Level.INPUT, Level.PINNED)
    return [HALF if only_half and activation else storage_of(value)]


def _issue_remat(eqn: Any, call: Inner, body: Any, arrays: Sequence[Any]) -> Any:
    params, of_operands = eqn.params, compat.barriers(eqn.params, len(eqn.invars))
    barriers = tuple(
        of_operands[i] for i in (*(i for i, _ in call.convention), *(i for i, _ in call.copies for _ in "qs"))
    )
    if params["differentiated"]:
        # This is already the backward pass of a remat. Only the barrier remains, which keeps the compiler from
        # sharing the recomputed values with the forward pass.
        behind = iter(lax.optimization_barrier([x for x, barrier in zip(arrays, barriers, strict=True) if barrier]))
        return body(*(next(behind) if b else x for x, b in zip(arrays, barriers, strict=True)))
    flags: bool | tuple[bool, ...] = barriers[0] if len(set(barriers)) == 1 else barriers
    key = ("remat", call.convention, flags, params["policy"])
    checkpoint = functools.partial(jax.checkpoint, body, prevent_cse=flags, policy=params["policy"])
    return cached_function(call.plans[0], key, checkpoint)(*arrays)


def _issue_remembering(
    step: Step, operands: Sequence[Any], body: Callable[..., Any], arrays: Sequence[Any], plan: Plan
) -> Any:
    """Issues a remat that keeps some of its inputs in fewer bits."""
    prevent_cse = any(compat.barriers(step.eqn.params, len(step.eqn.invars)))
    key = ("remembering", step.inner.convention, prevent_cse)

    def make() -> Any:
        def checkpoint(fun: Callable[..., Any], *args: Any) -> Any:
            return compat.checkpoint(fun, args, prevent_cse, None)

        return remembering(body, tangent_of(body, checkpoint))

    convention = step.inner.convention
    packs = kept(step.packs, [operands[i] for i, _ in convention])
    return cached_function(step.inner.plans[0], key, make)(arrays, packs)


# shard_map: the sub-jaxpr runs on every device, on that device's shards of the operands.


def _uses_on_devices(eqn: Any, outs: tuple[Use, ...], setting: Setting) -> Sequence[Use]:
    with compat.on_its_devices(eqn.params):  # The derivative rules inside are traced here.
        return _uses(eqn, outs, setting)


def _storages_of_shards(eqn: Any, i: int, value: Inferred | None, mask: int) -> Sequence[Storage]:
    if value is None:
        return [TRACED]
    spec = eqn.params["in_specs"][i]
    if not compat.shard_map_options(eqn.params)["axis_names"] <= compat.axes_of_spec(spec):
        return [FULL]  # Replicated: its cotangents are summed over the devices.
    return [HALF if value.level != Level.INPUT and mask == HALF.bit else value.storage]


def _issue_shard_map(eqn: Any, call: Inner, body: Any, arrays: Sequence[Any]) -> Any:
    in_specs = tuple(eqn.params["in_specs"][i] for i, _ in call.convention)
    return evaluator.shard_map(eqn, body, in_specs, tuple(eqn.params["out_specs"]))(*arrays)


# custom_vmap and sequential_vmap: a function with its author's batching rule.


def _issue_custom_vmap(eqn: Any, call: Inner, body: Any, arrays: Sequence[Any]) -> Any:
    params, setting = eqn.params, call.plans[0].setting
    fun = jax.custom_batching.custom_vmap(body)

    @fun.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> Any:
        out_batched: list[bool] = []

        def flat(*arrays: Any) -> Any:
            args = jax.tree.unflatten(params["in_tree"], arrays)
            batched = jax.tree.unflatten(params["in_tree"], list(in_batched))
            out, of_out = params["rule"](axis_size, batched, *args)
            out_batched[:] = jax.tree.leaves(of_out)
            return jax.tree.leaves(out)

        jaxpr = compat.trace(flat, *arrays)
        planned = plan_function(jaxpr, setting)
        results = run_closed(planned, jaxpr, values_of(arrays, planned.ins, setting.half))
        # The rule must return its results in the same dtypes as the function, which its plan gives.
        return tuple(arrays_of(results, call.plans[0].outs)), tuple(out_batched)

    return fun(*arrays)


_INLINED = _call(lambda fun, params: fun)

CALLS = {
    "jit": _one_sub_jaxpr(_issue_jit, _storages_of_jit),
    "call": _INLINED,
    "closed_call": _INLINED,
    "eval_jaxpr": _INLINED,  # the name of `closed_call` since JAX 0.12
    "xla_metadata_call": _call(compat.with_metadata),
    "composite": _call(compat.as_composite),
    "remat2": _one_sub_jaxpr(_issue_remat, _storages_of_remat, _uses, regions_inside=False, shares_copies=True),
    "shard_map": _one_sub_jaxpr(_issue_shard_map, _storages_of_shards, _uses_on_devices, compat.on_its_devices),
    # With the dtypes that its rule was written for.
    "custom_vmap_call": _one_sub_jaxpr(
        _issue_custom_vmap, lambda eqn, i, value, mask: [TRACED if value is None else FULL]
    ),
}
