"""The residual stream: a value that layer after layer adds to, `h = h + f(h)`."""

from __future__ import annotations

import collections
from typing import Any

from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.dataflow import dataflow, once_per_jaxpr, variables
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import Op, primitive

# By name: a residual connection is a sum; a difference is an error.


@once_per_jaxpr
def residual_additions(jaxpr: Any) -> frozenset[Any]:
    """The results of the additions of a jaxpr that make a residual stream.

    One operand of such an addition has another consumer: the layer whose result is added to it. The result is added to
    again, or returned, as in the body of a scan over layers. Other additions lack one of these: a GELU's
    `x + 0.044715 x³` is multiplied next, and a bias has no other consumer.
    """
    flow = dataflow(jaxpr)
    readers: collections.Counter[Any] = collections.Counter()
    continued = {flow.source(v, is_moved_whole) for v in flow.returned}
    additions = []
    for eqn in flow.eqns:
        if not eqn.outvars or is_moved_whole(eqn):
            continue
        read = {flow.source(v, is_moved_whole) for v in variables(eqn.invars)}
        readers.update(read)
        if adds_arrays(eqn):
            additions.append((eqn.outvars[0], read))
            continued |= read
    stream: set[Any] = set()
    for out, read in additions:
        if any(readers[v] > 1 for v in read) and (out in continued or not stream.isdisjoint(read)):
            stream.add(out)
    return frozenset(stream)


@once_per_jaxpr
def additions_in_a_row(jaxpr: Any) -> int:
    """The most additions of one residual stream, in all iterations of a `scan`."""
    additions = residual_additions(jaxpr)
    counts: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        before = max((counts.get(v, 0) for v in variables(eqn.invars)), default=0)
        row, added = primitive(eqn.primitive.name), 0
        if eqn.outvars and eqn.outvars[0] in additions:
            added = 1
        elif row.op is Op.ENTER:
            added = max((additions_in_a_row(sub.jaxpr) for sub in sub_jaxprs(eqn)), default=0)
            added *= eqn.params.get("length", 1) if row.loop else 1
        if added or is_moved_whole(eqn):
            counts.update((v, before + added) for v in eqn.outvars)
    return max(counts.values(), default=0)


def adds_arrays(eqn: Any) -> bool:
    """Whether an equation adds two float32 arrays of one shape."""
    if eqn.primitive.name not in ("add", "add_any"):
        return False
    out = eqn.outvars[0]
    # Storing scalars and vectors in half saves nothing.
    return (
        tracked(out)
        and len(out.aval.shape) > 1
        and all(tracked(v) and not isinstance(v, compat.Literal) and v.aval.shape == out.aval.shape for v in eqn.invars)
    )


def is_moved_whole(eqn: Any) -> bool:
    """Whether an equation passes on its one operand, with all elements."""
    return (
        len(eqn.invars) == len(eqn.outvars) == 1
        and primitive(eqn.primitive.name).op is Op.MOVE
        and not isinstance(eqn.invars[0], compat.Literal)
        and compat.numel(eqn.invars[0].aval) == compat.numel(eqn.outvars[0].aval)
    )
