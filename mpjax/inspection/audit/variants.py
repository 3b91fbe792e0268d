"""A call in other precisions than its own: the float32 program and the one that autocast plans in half."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import MATMULS
from mpjax.casting.autocast import autocast, traced_call
from mpjax.casting.regions import autocast_disabled
from mpjax.inspection.audit.dataflow import Flow, flow_of
from mpjax.inspection.audit.roofline import Costs, program_cost
from mpjax.inspection.reports import reason


def costs_of(fun: Callable[..., Any], args: Any, kwargs: Any, flow: Flow, devices: int = 1) -> tuple[Costs, list[str]]:
    """The costs of a call in float32, as it is, and planned in half; and what could not be traced.

    Args:
        fun, args, kwargs: the call.
        flow: of the call as it is.
        devices: how many run it; the costs are those of one.
    """
    now, notes = program_cost(flow, devices=devices), list[str]()
    float32 = planned = now
    operands = (value for node in flow.all_nodes() if node.site.name in MATMULS for value in node.reads[:2])
    dtypes = {value.aval.dtype.name for value in operands}
    half = next((dtype for dtype in ("bfloat16", "float16") if dtype in dtypes), "")
    if half:
        try:
            flow = _without_autocast(fun, args, kwargs)
        except Exception as error:  # whatever the author's function raises where it is not under autocast
            notes.append(f"the float32 program is the one in half, widened: {reason(error)}")
        # What was written in half is widened, and its casts left out.
        float32 = program_cost(flow, widened=True, devices=devices)
    if {"float32", "float64"} & dtypes:
        try:
            planned = program_cost(_under_autocast(fun, args, kwargs, half or "float16"), devices=devices)
        except Exception as error:  # autocast refuses some programs; the audit has all else to say
            notes.append(f"autocast has no plan for it, so 'all in half' is the program as it is: {reason(error)}")
    return Costs(float32, now, planned), notes


def _without_autocast(fun: Callable[..., Any], args: Any, kwargs: Any) -> Flow:
    with compat.apart_from_other_traces(), autocast_disabled():
        return flow_of(traced_call(fun, args, kwargs).jaxpr)


def _under_autocast(fun: Callable[..., Any], args: Any, kwargs: Any, half: str) -> Flow:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They are about running it, and it is not run.
        return flow_of(traced_call(autocast(fun, f"mixed_{half}"), args, kwargs).jaxpr)
