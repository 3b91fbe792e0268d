"""Takes the residual stream out of `jax.checkpoint`: `h + checkpoint(f)(h)` for `checkpoint(h + f(h))`.

A checkpoint keeps what goes in until the backward pass. If the stream's addition is inside, its float32 would be kept
for each layer. If it is outside, it follows from nothing, and the checkpoint keeps the half copy that the layer reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from mpjax.casting.streams import adds_arrays
from mpjax.program import compat, derivative_rules
from mpjax.program.dataflow import Dataflow, live_equations, once_per_jaxpr
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import primitive

# By name: other calls keep nothing of what goes in.
_CHECKPOINTS = ("remat2", "checkpoint")


def without_streams(jaxpr: Any) -> Any:
    """An open jaxpr whose checkpoints return what they add to a stream, in place of the sum."""
    return _changed(jaxpr) or jaxpr


@once_per_jaxpr
def _changed(jaxpr: Any) -> Any:
    eqns = [new for eqn in jaxpr.eqns for new in _outside(_inside(eqn))]
    if len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return None
    changed = jaxpr.replace(eqns=eqns)
    derivative_rules.inherit(changed, jaxpr)
    return changed


def _inside(eqn: Any) -> Any:
    """An equation whose calls and loops have other checkpoints."""
    row = primitive(eqn.primitive.name)
    for inner in sub_jaxprs(eqn) if (row.call or row.loop) and not row.rule else ():
        changed = _changed(inner.opened)
        if changed is not None:
            eqn = compat.with_sub_jaxpr(eqn, inner.jaxpr, changed)
    return eqn


def _outside(eqn: Any) -> list[Any]:
    """A checkpoint that returns what it adds, and the additions; any other equation alone."""
    is_checkpoint = eqn.primitive.name in _CHECKPOINTS and not eqn.params["differentiated"]
    return _split(eqn) if is_checkpoint else [eqn]


def _split(eqn: Any) -> list[Any]:
    """A call that returns what it adds, and the additions; the call alone if it adds to none of its inputs."""
    (inner,) = sub_jaxprs(eqn)
    changed, sums = _apart(inner.opened)
    if not sums:
        return [eqn]
    outvars, after = list(eqn.outvars), []
    for k, i, add in sums:
        outvars[k] = compat.new_variable(eqn.outvars[k])
        total = add.replace(invars=[eqn.invars[i], outvars[k]], outvars=[eqn.outvars[k]])
        after.append(compat.in_scopes_of(total, eqn))
    return [compat.with_sub_jaxpr(eqn, inner.jaxpr, changed).replace(outvars=outvars), *after]


@once_per_jaxpr
def _apart(body: Any) -> tuple[Any, list[tuple[int, int, Any]]]:
    """The jaxpr of a call without its additions to a stream, and the index of the result and of the input of each."""
    eqns = [new for eqn in body.eqns for new in (_split(eqn) if _is_jitted(eqn) else [eqn])]
    flow = Dataflow(eqns)
    new: list[Any] = []
    sums, returned = [], list(body.outvars)
    for k, v in enumerate(body.outvars):
        found = _stream(flow, body.invars, v)
        if found is not None:
            i, add, addends = found
            returned[k] = functools.reduce(functools.partial(_sum, add, new), addends)
            sums.append((k, i, add))
    if not sums:
        return None, []
    changed = body.replace(eqns=[*eqns, *new], outvars=returned)
    changed = changed.replace(eqns=live_equations(changed))
    derivative_rules.inherit(changed, body)
    return changed, sums


def _is_jitted(eqn: Any) -> bool:
    row = primitive(eqn.primitive.name)
    return row.call and not row.rule and eqn.primitive.name not in _CHECKPOINTS and len(sub_jaxprs(eqn)) == 1


def _sum(add: Any, eqns: list[Any], a: Any, b: Any) -> Any:
    """The sum of two variables, by an equation like another that is added to some."""
    out = compat.new_variable(a)
    eqns.append(add.replace(invars=[a, b], outvars=[out]))
    return out


def _stream(flow: Dataflow, inputs: Sequence[Any], v: Any) -> tuple[int, Any, list[Any]] | None:
    """The index of the input that a value is a sum with, the last addition, and what is added."""
    eqn = flow.maker(v)
    if eqn is None or not adds_arrays(eqn):
        return None
    for before, added in (eqn.invars, eqn.invars[::-1]):
        if before in inputs and before is not added:
            return list(inputs).index(before), eqn, [added]
        if (found := _stream(flow, inputs, before)) is not None:
            return found[0], eqn, [*found[2], added]
    return None
