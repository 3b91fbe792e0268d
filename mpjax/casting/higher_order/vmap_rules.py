"""`custom_vmap` and `sequential_vmap`: a function with its author's batching rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mpjax._jaxpr import compat
from mpjax.casting.classify import Listing, tracked
from mpjax.casting.higher_order.calls import uses_of_call
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
from mpjax.casting.infer import Inference, plan_jaxpr
from mpjax.casting.lattice import FULL, PARAMETER, TRACED, storage_of
from mpjax.casting.plan import Plan, Step
from mpjax.casting.rewrite import Environment, array_of, run_closed, values_of
from mpjax.casting.uses import RESULT, Use


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    inner = plan_call(inference, eqn, listing, compat.call_jaxpr(eqn.params))
    if inner.unchanged:
        return as_traced(inference, eqn, listing, inner.outs, inner)
    storages = [[FULL if tracked(v) else TRACED] for v in eqn.invars]  # the dtypes that the rule was written for
    return enter(eqn, listing, inner.outs, Call(inner, convention_of(inference, eqn, storages)))


def _issue(step: Step, operands: Sequence[Any], outer: Plan, env: Environment) -> Sequence[Any]:
    call: Call = step.inner
    params, setting = step.eqn.params, outer.setting
    fun = jax.custom_batching.custom_vmap(function_of(call.plan, call.convention, compat.call_jaxpr(params)))

    @fun.def_vmap
    def rule(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> Any:
        found: dict[str, Any] = {}

        def flat(*arrays: Any) -> Any:
            args = jax.tree.unflatten(params["in_tree"], arrays)
            batched = jax.tree.unflatten(params["in_tree"], list(in_batched))
            out, out_batched = params["rule"](axis_size, batched, *args)
            found["batched"] = tuple(jax.tree.leaves(out_batched))
            return jax.tree.leaves(out)

        jaxpr = compat.trace(flat, *arrays)
        opened = compat.open_jaxpr(jaxpr).jaxpr
        ins = tuple(PARAMETER if tracked(v) else None for v in opened.invars)
        wanted = tuple(RESULT if tracked(v) else Use.READ for v in opened.outvars)
        planned = plan_jaxpr(jaxpr, ins, wanted, setting)
        results = run_closed(planned, jaxpr, values_of(arrays, ins, setting.half))
        # The rule must return its results in the same dtypes as the function, which its plan gives.
        stored = [storage_of(x) for x in call.plan.outs]
        return tuple(array_of(r, storage) for r, storage in zip(results, stored, strict=True)), found["batched"]

    return values_of(fun(*flatten_operands(call.convention, operands)), call.plan.outs, setting.half)


CUSTOM_VMAP = HigherOrder(uses_of_call, _infer, _issue)
