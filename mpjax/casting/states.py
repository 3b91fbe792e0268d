"""The states of a program: what its layers or steps change, and pass on.

A state goes on in whatever is made of it element by element: moved, normalized, or multiplied by a gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, dataflow, once_per_jaxpr, variables
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import BACKWARD, phase_of, scopes

# By name: a residual connection is a sum; a difference is an error.


@once_per_jaxpr
def carried(jaxpr: Any) -> dict[Any, Any]:
    """The values that are another value changed, each with that one, which is changed no further back.

    Changed is what is moved whole, scaled or shifted as by a norm, multiplied by a gate, or mapped element by element.
    """
    flow = dataflow(jaxpr)
    states: dict[Any, Any] = {}
    for eqn in flow.eqns:
        for out in eqn.outvars:
            before = _before(flow, eqn, out, states)
            if before is not None:
                states[out] = states.get(before, before)
    return states


def _before(flow: Dataflow, eqn: Any, out: Any, states: Mapping[Any, Any]) -> Any:
    """The operand that an equation changes to a result; None if there is none, or if there are several."""
    if is_moved_whole(eqn):
        return eqn.invars[0]
    row = primitive(eqn.primitive.name)
    arrays = [v for v in variables(eqn.invars) if v.aval.shape == out.aval.shape]
    if len(out.aval.shape) < 2 or not arrays:
        return None
    inner = sub_jaxprs(eqn)[0] if row.call else None
    if inner is not None and not _is_elementwise(inner.jaxpr):
        root = carried(inner.jaxpr).get(inner.opened.outvars[eqn.outvars.index(out)])
        return next(
            (v for v, w in zip(eqn.invars, inner.opened.invars, strict=True) if w is root and v in arrays), None
        )
    if inner is None and not row.pointwise:
        return None
    wide = [v for v in arrays if tracked(v) and not is_repeated(flow, v, NORM)] or arrays
    if row.scales and len({states.get(v, v) for v in wide}) > 1:
        wide = [v for v in wide if not is_gate(flow, v)]
        wide = [
            v for v in wide if not any(w is not v and _is_layer(flow, eqn, states.get(w, w), v) for w in wide)
        ] or wide
    elif _chooses(eqn) and len({states.get(v, v) for v in wide}) > 1:  # what was added to the other
        wide = [v for v in wide if not any(w is not v and flow.depends([w], states.get(v, v)) for w in wide)]
    divided = row.linear != "first" or wide[:1] == eqn.invars[:1]
    return wide[0] if len({states.get(v, v) for v in wide}) == 1 and divided else None


def _chooses(eqn: Any) -> bool:
    """Whether each element of an equation's result is that of one of its operands, as for `jnp.where`."""
    row = primitive(eqn.primitive.name)
    return bool(row.elements) or (row.call and all(map(_chooses, sub_jaxprs(eqn)[0].opened.eqns[-1:])))


def _is_layer(flow: Dataflow, eqn: Any, state: Any, v: Any) -> bool:
    """Whether an operand of an equation is what a layer computes from a state, or multiplies a cotangent by."""
    if phase_of(scopes(eqn)) == BACKWARD:
        maker = flow.maker(v)
        return maker is not None and phase_of(scopes(maker)) != BACKWARD
    return flow.depends([v], state)


@once_per_jaxpr
def _is_elementwise(jaxpr: Any) -> bool:
    """Whether each element of its results follows from the same element of its inputs, or from a number."""
    rows = [(eqn, primitive(eqn.primitive.name)) for eqn in jaxpr.eqns]
    return all(
        row.pointwise
        or (row.whole and not getattr(eqn.invars[0].aval, "shape", ()))
        or (row.call and all(_is_elementwise(sub.jaxpr) for sub in sub_jaxprs(eqn)))
        for eqn, row in rows
    )


NORM = 4  # Operations between a norm's statistics and what it multiplies by.


def is_repeated(flow: Dataflow, v: Any, depth: int) -> bool:
    """Whether a value follows from smaller ones alone, such as a norm's statistics and weights."""
    eqn = flow.maker(v)
    if eqn is None or not depth:
        return False
    row, count = primitive(eqn.primitive.name), compat.numel(v.aval)
    return (row.moves or row.pointwise) and all(
        compat.numel(x.aval) < count or is_repeated(flow, x, depth - 1) for x in variables(eqn.invars)
    )


def is_gate(flow: Dataflow, v: Any) -> bool:
    """Whether a value is bounded, as a sigmoid or tanh, or is some elements of one, or a function of one.

    Functions are sums and products with a number, exponentials and roots.
    """
    v = v if isinstance(v, compat.Literal) else flow.source(v, _is_moved)
    eqn = None if isinstance(v, compat.Literal) else flow.maker(v)
    if eqn is None:
        return False
    row = primitive(eqn.primitive.name)
    if row.call:
        (inner,) = sub_jaxprs(eqn)
        return is_gate(dataflow(inner.opened), inner.opened.outvars[eqn.outvars.index(v)])
    arrays = variables(eqn.invars)
    if (row.adds or row.scales) and len(arrays) == 1 < len(eqn.invars):
        return is_gate(flow, arrays[0])
    if row.bounds == (0.0, np.inf) and row.pointwise:  # such as its exponential
        return is_gate(flow, arrays[0])
    return row.bounds in ((0.0, 1.0), (-1.0, 1.0)) and row.op is Op.INFER


def _is_moved(eqn: Any) -> bool:
    return len(eqn.invars) == 1 and primitive(eqn.primitive.name).op is Op.MOVE


def adds_arrays(eqn: Any, names: Sequence[str] = ("add", "add_any")) -> bool:
    """Whether an equation adds two float32 arrays of one shape."""
    if eqn.primitive.name not in names:
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
