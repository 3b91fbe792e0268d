"""Variants of a call: its float32 program, and its half program as autocast plans it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from mpjax._jaxpr.primitives import MATMULS
from mpjax.casting.autocast import autocast, traced_call
from mpjax.casting.regions import autocast_disabled
from mpjax.inspection.audit.dataflow import Flow, flow_of
from mpjax.inspection.audit.roofline import Costs, program_cost
from mpjax.inspection.reports import reason


def costs_of(fun: Callable[..., Any], args: Any, kwargs: Any, flow: Flow, devices: int = 1) -> tuple[Costs, list[str]]:
    """The costs of a call in float32, as written and as planned in half, and notes on variants that did not trace.

    Args:
        fun, args, kwargs: The call.
        flow: The graph of the call as written.
        devices: Number of devices; the costs are those of one device.
    """
    now, notes = program_cost(flow, devices=devices), list[str]()
    float32 = planned = now
    operands = (value for node in flow.all_nodes() if node.site.name in MATMULS for value in node.reads[:2])
    dtypes = {value.aval.dtype.name for value in operands}
    half = next((dtype for dtype in ("bfloat16", "float16") if dtype in dtypes), "")
    if half:
        try:
            flow = _without_autocast(fun, args, kwargs)
        except Exception as error:  # the user's function may raise any error without autocast
            notes.append(f"the float32 program is the half program, widened: {reason(error)}")
        # Explicit half is widened to float32, and its casts are dropped.
        float32 = program_cost(flow, widened=True, devices=devices)
    if {"float32", "float64"} & dtypes:
        try:
            planned = program_cost(_under_autocast(fun, args, kwargs, half or "float16"), devices=devices)
        except Exception as error:  # autocast rejects some programs; the rest of the audit is still valid
            notes.append(f"autocast has no plan for it, so 'all in half' is the unchanged program: {reason(error)}")
    return Costs(float32, now, planned), notes


def _without_autocast(fun: Callable[..., Any], args: Any, kwargs: Any) -> Flow:
    with autocast_disabled():
        return flow_of(traced_call(fun, args, kwargs).jaxpr)


def _under_autocast(fun: Callable[..., Any], args: Any, kwargs: Any, half: str) -> Flow:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # They concern execution, and the program is only traced.
        return flow_of(traced_call(autocast(fun, f"mixed_{half}"), args, kwargs).jaxpr)
