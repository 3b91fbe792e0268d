"""The states of a program: what its layers or steps change, and pass on.

A state goes on in whatever is made of it element by element: moved, normalized, multiplied by a gate, or joined from
pieces that were changed one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, dataflow, once_per_jaxpr, variables
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import BACKWARD, phase_of, scopes

# By name: a residual connection is a sum; a difference is an error. Padding is a join with zeros.


class States(NamedTuple):
    """The states of a jaxpr.

    Args:
        whole: The values that are another value changed, each with that one, which is changed no further back. Changed
            is what is moved, scaled or shifted as by a norm, multiplied by a gate, or mapped element by element.
        pieces: Slices of a value, each with that value, changed no further back either.
        joined: What was computed from a piece, element by element, and then joined with the other pieces: the joined
            array is the value changed.
        padded: What is padded, as the gradient of a slice is, and sums of such arrays.
    """

    whole: dict[Any, Any]
    pieces: dict[Any, Any]
    joined: set[Any]
    padded: set[Any]

    def root(self, v: Any) -> Any:
        """The value of which a value is a piece, or of which it is a change; itself if there is none."""
        v = self.whole.get(v, v)
        return self.pieces.get(v, v)


@once_per_jaxpr
def states_of(jaxpr: Any) -> States:
    """The states of a jaxpr, without those of its sub-jaxprs."""
    flow, found = dataflow(jaxpr), States({}, {}, set(), set())
    for eqn in flow.eqns:
        if _pads(eqn) or (adds_arrays(eqn) and found.padded.issuperset(eqn.invars)):
            found.padded.update(eqn.outvars)
        for out in eqn.outvars:
            before = _before(flow, eqn, out, found.whole)
            before = _rejoined(flow, eqn, found) if before is None else before
            if before is not None:
                found.whole[out] = found.whole.get(before, before)
            elif (piece := _cut(eqn)) is not None and (not _pads(eqn) or piece is not found.root(piece)):
                found.pieces[out] = found.root(piece)
    return found


def carried(jaxpr: Any) -> dict[Any, Any]:
    """The values of a jaxpr that are another value changed, each with that one."""
    return states_of(jaxpr).whole


def _cut(eqn: Any) -> Any:
    """What an equation slices, or pads, as the gradient of a slice is; None for another equation."""
    row = primitive(eqn.primitive.name)
    window = row.lookup and not eqn.params["dimension_numbers"].collapsed_slice_dims
    cuts = (row.op is Op.MOVE and row.elements == "0") or window or _pads(eqn)
    return eqn.invars[0] if cuts and not isinstance(eqn.invars[0], compat.Literal) else None


def _rejoined(flow: Dataflow, eqn: Any, found: States) -> Any:
    """The piece that was changed last, if an equation joins pieces of one value; that value if none was changed.

    The gradient of slices is a sum of padded pieces.
    """
    origins = [_origins(flow, flow.source(v, _pads), found) for v in _parts(flow, eqn, found)]
    root = next((v for v in origins[0] if all(v in each for each in origins)), None) if origins else None
    if root is None:
        return None
    changed = [v for each in origins if (v := each[root]) is not None]
    found.joined.update(changed)
    return changed[-1] if changed else root


def changes_piece(found: States, eqn: Any) -> bool:
    """Whether what an equation computes is joined with other pieces of a value, or adds to a padded piece."""
    return eqn.outvars[0] in found.joined or (adds_arrays(eqn) and not found.padded.isdisjoint(eqn.invars))


def _parts(flow: Dataflow, eqn: Any, found: States) -> list[Any]:
    """The arrays that an equation joins; that of which it overwrites a part, and by what, if not by numbers."""
    row = primitive(eqn.primitive.name)
    if eqn.outvars[0] in found.padded:
        return eqn.invars if adds_arrays(eqn) else []
    if not row.join and not row.overwrites:
        return []
    parts = [v for v in variables(eqn.invars[i] for i in row.sources(len(eqn.invars))) if tracked(v)]
    kept = parts[:1] if row.overwrites else []
    return kept + [v for v in parts[len(kept) :] if not is_repeated(flow, v, NORM)]


def _origins(flow: Dataflow, v: Any, found: States) -> dict[Any, Any]:
    """The values of which a value is a piece, or all, each with the change of it that the value is, if it is one."""
    whole = found.whole.get(v, v)
    origins = {found.root(v): None}
    maker = flow.maker(whole)
    if maker is not None and primitive(maker.primitive.name).pointwise:
        pieces = [found.whole.get(w, w) for w in variables(maker.invars)]
        origins = {found.pieces[w]: whole for w in pieces if w in found.pieces} | origins
    return origins


def _pads(eqn: Any) -> bool:
    return eqn.primitive.name == "pad"


def _before(flow: Dataflow, eqn: Any, out: Any, states: Mapping[Any, Any]) -> Any:
    """The operand that an equation changes to a result; None if there is none, or if there are several."""
    if is_moved_whole(eqn) or _permutes(eqn):
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
    if inner is not None and phase_of(scopes(eqn)) == BACKWARD:
        wide = [v for v in wide if not _is_layer(flow, eqn, None, v)]
    elif row.scales and len({states.get(v, v) for v in wide}) > 1:
        wide = [v for v in wide if not is_gate(flow, v)]
        wide = [
            v for v in wide if not any(w is not v and _is_layer(flow, eqn, states.get(w, w), v) for w in wide)
        ] or wide
        wide = _followed(flow, out, wide, states) if len(wide) > 1 else wide
    elif _chooses(eqn) and len({states.get(v, v) for v in wide}) > 1:  # what was added to the other
        wide = [v for v in wide if not any(w is not v and flow.depends([w], states.get(v, v)) for w in wide)]
    divided = row.linear != "first" or wide[:1] == eqn.invars[:1]
    return wide[0] if len({states.get(v, v) for v in wide}) == 1 and divided else None


def _permutes(eqn: Any) -> bool:
    """Whether an equation looks up as many elements as there are, as of features in another order."""
    return (
        primitive(eqn.primitive.name).lookup
        and not isinstance(eqn.invars[0], compat.Literal)
        and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    )


def _followed(flow: Dataflow, product: Any, factors: list[Any], states: Mapping[Any, Any]) -> list[Any]:
    """The factors of a product on which depends what is added to it, as a layer depends on its state."""
    sums = [eqn for eqn in flow.readers.get(product, ()) if adds_arrays(eqn)]
    added = [v for eqn in sums for v in eqn.invars if v is not product]
    return [v for v in factors if flow.depends(added, states.get(v, v))] or factors


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
    """Whether each element of its results follows from the same element of its float32 inputs, or from a number."""
    rows = [(eqn, primitive(eqn.primitive.name)) for eqn in jaxpr.eqns]
    return all(
        row.pointwise
        or not any(map(tracked, eqn.outvars))  # such as a mask for each row
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
    return (row.moves or row.whole or row.pointwise) and all(
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


def adds_arrays(eqn: Any, names: Sequence[str] = ("add", "add_any"), axes: int = 2) -> bool:
    """Whether an equation adds two float32 arrays of one shape, which has some axes at least."""
    if eqn.primitive.name not in names:
        return False
    out = eqn.outvars[0]
    # Storing scalars and vectors in half saves nothing.
    return (
        tracked(out)
        and len(out.aval.shape) >= axes
        and all(tracked(v) and not isinstance(v, compat.Literal) and v.aval.shape == out.aval.shape for v in eqn.invars)
    )


def adds_to_part(flow: Dataflow, eqn: Any) -> bool:
    """Whether an equation adds to some elements of a float32 array, `x.at[rows].add(y)`; not to zeros."""
    row = primitive(eqn.primitive.name)
    if not (row.kernel and row.accumulates):
        return False
    first = eqn.invars[0]
    return tracked(first) and len(first.aval.shape) > 1 and not is_repeated(flow, first, NORM)


def is_moved_whole(eqn: Any) -> bool:
    """Whether an equation passes on its one operand, with all elements."""
    row = primitive(eqn.primitive.name)
    return (
        len(eqn.invars) == len(eqn.outvars) == 1
        and (row.op is Op.MOVE or row.whole)
        and not isinstance(eqn.invars[0], compat.Literal)
        and compat.numel(eqn.invars[0].aval) == compat.numel(eqn.outvars[0].aval)
    )
