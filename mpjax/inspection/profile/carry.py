"""Which outputs of a step are the next step's arguments: those that have an argument's structure and update its values.

Gradients have the structure of the parameters too. But a step returns `parameters + update`, a counter plus one, a
`where` or a `cond` of old and new; so some output is connected with its argument by additions and selections alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._jaxpr.primitives import Op, primitive
from mpjax.casting.autocast import traced_call
from mpjax.inspection.audit.dataflow import Flow, Value, flow_of


def signature(tree: Any) -> tuple[Any, ...]:
    """What makes two trees alike: structure, shapes, dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def carried(step: Callable[..., Any], args: Sequence[Any], out: Any, donates: bool) -> int:
    """How many leading outputs replace the leading arguments in the next step.

    Args:
        step: the function.
        args: its arguments; those that are donated may be deleted by now.
        out: what it returned.
        donates: whether it donates arguments, which then have to be replaced.
    """
    before = [signature(arg) for arg in args]
    if before and signature(out) == before[0]:
        count = 1
    else:
        outs = out if isinstance(out, (tuple, list)) else ()
        alike = [signature(x) == arg for x, arg in zip(outs, before, strict=False)]
        count = alike.index(False) if False in alike else len(alike)
    return count if count and (donates or _updates(step, args, count)) else 0


def _updates(step: Callable[..., Any], args: Sequence[Any], count: int) -> bool:
    """Whether one of the leading outputs is connected with its own argument by additions and selections."""
    flow = flow_of(traced_call(step, tuple(args), {}).jaxpr)
    leaves = len(jax.tree.leaves(args[:count]))
    inputs = {value: frozenset([i]) for i, value in enumerate(flow.inputs[:leaves])}
    reached = _reached(flow, inputs)
    # What is returned as it came in is carried or not without a difference.
    return any(i in reached[i] and flow.outputs[i] is not flow.inputs[i] for i in range(min(leaves, len(reached))))


def _reached(flow: Flow, inputs: dict[Value, frozenset[int]]) -> list[frozenset[int]]:
    """For each output the inputs that it is connected with."""
    found = dict(inputs)

    def of(values: Sequence[Value]) -> frozenset[int]:
        return frozenset().union(*(found.get(value, frozenset()) for value in values))

    for node in flow.nodes:
        row = primitive(node.site.name)
        if node.site.name == "cond":
            for branch in node.inner:
                given = {v: of([node.reads[i]]) for v, i in zip(branch.inputs, branch.operands, strict=True)}
                for value, origins in zip(node.writes, _reached(branch, found | given), strict=True):
                    found[value] = found.get(value, frozenset()) | origins
        elif row.adds or row.whole or row.op is Op.CONVERT or node.site.name == "select_n":
            shape = node.writes[0].aval.shape
            alike = of([value for value in node.reads if getattr(value.aval, "shape", None) == shape])
            found |= dict.fromkeys(node.writes, alike)
    return [of([value]) for value in flow.outputs]
