"""The residual stream: a value that layer after layer adds to, `h = h + f(h)`."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.primitives import Op, primitive


def residual_additions(jaxpr: Any) -> frozenset[Any]:
    """The results of the additions of a jaxpr that make a residual stream.

    One operand of such an addition has another consumer: the layer whose result is added to it. The result is added to
    again, or returned, as in the body of a scan over layers. Other additions lack one of these: a GELU's
    `x + 0.044715 x³` is multiplied next, and a bias has no other consumer.
    """
    jaxpr = compat.open_jaxpr(jaxpr).jaxpr
    moved = _moved(jaxpr)
    readers: collections.Counter[Any] = collections.Counter()
    continued = {_source(v, moved) for v in jaxpr.outvars if not isinstance(v, compat.Literal)}
    additions = []
    for eqn in jaxpr.eqns:
        if not eqn.outvars or eqn.outvars[0] in moved:
            continue
        read = {_source(v, moved) for v in eqn.invars if not isinstance(v, compat.Literal)}
        readers.update(read)
        if _adds_arrays(eqn):
            additions.append((eqn.outvars[0], read))
            continued |= read
    stream: set[Any] = set()
    for out, read in additions:
        if any(readers[v] > 1 for v in read) and (out in continued or not stream.isdisjoint(read)):
            stream.add(out)
    return frozenset(stream)


def _adds_arrays(eqn: Any) -> bool:
    if eqn.primitive.name not in ("add", "add_any"):
        return False
    out = eqn.outvars[0]
    # Storing scalars and vectors in half saves nothing.
    return (
        tracked(out)
        and len(out.aval.shape) > 1
        and all(tracked(v) and not isinstance(v, compat.Literal) and v.aval.shape == out.aval.shape for v in eqn.invars)
    )


def _moved(jaxpr: Any) -> dict[Any, Any]:
    """The operand of each equation that passes it on whole: a reshape, a sharding constraint, a name."""
    return {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if is_moved_whole(eqn)}


def is_moved_whole(eqn: Any) -> bool:
    """Whether an equation passes on its one operand, with all elements."""
    return (
        len(eqn.invars) == len(eqn.outvars) == 1
        and primitive(eqn.primitive.name).op is Op.MOVE
        and not isinstance(eqn.invars[0], compat.Literal)
        and compat.numel(eqn.invars[0].aval) == compat.numel(eqn.outvars[0].aval)
    )


def _source(v: Any, moved: Mapping[Any, Any]) -> Any:
    while v in moved:
        v = moved[v]
    return v
