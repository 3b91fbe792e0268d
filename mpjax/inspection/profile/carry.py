"""Infers the outputs of a step that become arguments of the next: they have an argument's structure and update it.

Gradients also have the structure of the parameters. But an update is `parameters + update`, a counter plus one, or a
`where` or `cond` of old and new values. So some carried output depends on its argument through additions and
selections alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._jaxpr.primitives import Op, primitive
from mpjax.casting.autocast import traced_call
from mpjax.inspection.audit.dataflow import Flow, Value, flow_of


def signature(tree: Any) -> tuple[Any, ...]:
    """The structure, shapes and dtypes of a tree, for comparison."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)


def carried(
    step: Callable[..., Any], args: Sequence[Any], out: Any, donates: bool, kwargs: Mapping[str, Any] | None = None
) -> int:
    """The number of leading outputs that replace the leading arguments in the next step.

    Args:
        step: The function.
        args: Its arguments. Donated ones may already be deleted.
        out: Its outputs.
        donates: Whether it donates arguments, which must then be replaced.
        kwargs: Its keyword arguments.
    """
    before = [signature(arg) for arg in args]
    if before and signature(out) == before[0]:
        count = 1
    else:
        outs = out if isinstance(out, (tuple, list)) else ()
        alike = [signature(x) == arg for x, arg in zip(outs, before, strict=False)]
        count = alike.index(False) if False in alike else len(alike)
    try:
        return count if count and (donates or _updates(step, args, kwargs or {}, count)) else 0
    except Exception:  # A step that is not jitted may not be traceable.
        return 0


def _updates(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> bool:
    """Whether a leading output depends on its own argument through additions and selections."""
    flow = flow_of(traced_call(step, tuple(args), dict(kwargs)).jaxpr)
    leaves = len(jax.tree.leaves(args[:count]))
    inputs = {value: frozenset([i]) for i, value in enumerate(flow.inputs[:leaves])}
    reached = _reached(flow, inputs)
    # For an argument returned unchanged, carrying makes no difference.
    return any(i in reached[i] and flow.outputs[i] is not flow.inputs[i] for i in range(min(leaves, len(reached))))


def _reached(flow: Flow, inputs: dict[Value, frozenset[int]]) -> list[frozenset[int]]:
    """For each output, the inputs that it depends on through additions and selections."""
    found = dict(inputs)

    def of(values: Sequence[Value]) -> frozenset[int]:
        return frozenset().union(*(found.get(value, frozenset()) for value in values))

    for node in flow.nodes:
        row = primitive(node.site.name)
        if node.site.name == "cond":
            for branch in node.inner:
                for value, origins in zip(node.writes, _reached(branch, found), strict=True):
                    found[value] = found.get(value, frozenset()) | origins
        elif row.adds or row.whole or row.op is Op.CONVERT or node.site.name == "select_n":
            shape = node.writes[0].aval.shape
            alike = of([value for value in node.reads if getattr(value.aval, "shape", None) == shape])
            found |= dict.fromkeys(node.writes, alike)
    return [of([value]) for value in flow.outputs]
