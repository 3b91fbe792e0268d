"""Takes the residual stream out of `jax.checkpoint`: `h + checkpoint(f)(h)` for `checkpoint(h + f(h))`.

Layers may scale it: `0.9 * h + checkpoint(f)(h)`, or `0.7 * h + checkpoint(0.7 * f)(h)` for `0.7 * (h + f(h))`. A
checkpoint keeps what goes in until the backward pass. If the stream's addition is inside, its float32 would be kept for
each layer. If it is outside, it follows from nothing, and the checkpoint keeps the half copy that the layer reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from mpjax.casting.setting import tracked
from mpjax.casting.states import adds_arrays
from mpjax.casting.streams import added_to
from mpjax.program import compat, derivative_rules
from mpjax.program.dataflow import Dataflow, live_equations, once_per_jaxpr, variables
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
    return _split(eqn) if _is_checkpoint(eqn) else [eqn]


def _is_checkpoint(eqn: Any) -> bool:
    return eqn.primitive.name in _CHECKPOINTS and not eqn.params["differentiated"]


def stores_its_inputs(eqn: Any) -> bool:
    """Whether an equation is a `jax.checkpoint` whose policy saves nothing inside."""
    return _is_checkpoint(eqn) and eqn.params["policy"] in (None, jax.checkpoint_policies.nothing_saveable)


def adds_to(eqn: Any, i: int) -> bool:
    """Whether a residual stream inside of a checkpoint that stores its inputs adds to the i-th.

    The stream is float32. What is stored is the half copy that the layers read.
    """
    (inner,) = sub_jaxprs(eqn)
    return stores_its_inputs(eqn) and inner.opened.invars[i] in added_to(inner.jaxpr)


def _split(eqn: Any) -> list[Any]:
    """A call that returns what it adds, and the additions; the call alone if it adds to none of its inputs."""
    (inner,) = sub_jaxprs(eqn)
    changed, sums = _apart(inner.opened)
    if not sums:
        return [eqn]
    outvars = list(eqn.outvars)
    after: list[Any] = []
    for k, i, steps in sums:
        outvars[k] = compat.new_variable(eqn.outvars[k])
        stream = eqn.invars[i]
        for step in steps:
            if step.added is None:
                stream = _like(step.eqn, [stream if v is step.stream else v for v in step.eqn.invars], after)
        last = next(step.eqn for step in reversed(steps) if step.added is not None)
        after.append(last.replace(primitive=lax.add_p, invars=[stream, outvars[k]], outvars=[eqn.outvars[k]]))
    after = [compat.in_scopes_of(each, eqn) for each in after]
    return [compat.with_sub_jaxpr(eqn, inner.jaxpr, changed).replace(outvars=outvars), *after]


class _Step(NamedTuple):
    """An equation of a stream: it adds, subtracts, or scales by a number.

    Args:
        eqn: The equation.
        stream: The stream before it.
        added: What it adds or subtracts; None if it scales.
    """

    eqn: Any
    stream: Any
    added: Any = None


@once_per_jaxpr
def _apart(body: Any) -> tuple[Any, list[tuple[int, int, list[_Step]]]]:
    """The jaxpr of a call without its streams, and the index of the result and of the input of each, and its steps."""
    eqns = [new for eqn in body.eqns for new in (_split(eqn) if _is_jitted(eqn) else [eqn])]
    flow = Dataflow(eqns)
    new: list[Any] = []
    sums, returned = [], list(body.outvars)
    for k, v in enumerate(body.outvars):
        steps = _stream(flow, body.invars, v)
        if any(step.added is not None for step in steps):
            returned[k] = _added(steps, new)
            sums.append((k, list(body.invars).index(steps[0].stream), steps))
    if not sums:
        return None, []
    changed = body.replace(eqns=[*eqns, *new], outvars=returned)
    changed = changed.replace(eqns=live_equations(changed))
    derivative_rules.inherit(changed, body)
    return changed, sums


def _added(steps: Sequence[_Step], eqns: list[Any]) -> Any:
    """What the steps of a stream add to it in all; `eqns` gets the equations that compute it."""
    total = None
    for step in steps:
        if step.added is None and total is not None:
            total = _like(step.eqn, [total if v is step.stream else v for v in step.eqn.invars], eqns)
        elif total is not None:
            total = _like(step.eqn, [total, step.added], eqns)
        else:
            subtracts = step.eqn.primitive is lax.sub_p
            total = _like(step.eqn.replace(primitive=lax.neg_p), [step.added], eqns) if subtracts else step.added
    return total


def _is_jitted(eqn: Any) -> bool:
    row = primitive(eqn.primitive.name)
    return row.call and not row.rule and eqn.primitive.name not in _CHECKPOINTS and len(sub_jaxprs(eqn)) == 1


def _like(eqn: Any, invars: Sequence[Any], eqns: list[Any]) -> Any:
    """The result of an equation like another one, of other variables."""
    out = compat.new_variable(eqn.outvars[0])
    eqns.append(eqn.replace(invars=list(invars), outvars=[out]))
    return out


def _stream(flow: Dataflow, inputs: Sequence[Any], v: Any) -> list[_Step]:
    """The steps by which an input becomes a value; empty if it does so by other equations."""
    eqn = flow.maker(v)
    if eqn is None:
        return []
    if adds_arrays(eqn, ("add", "add_any", "sub")):
        pairs = [*zip(eqn.invars, eqn.invars[::-1], strict=True)]
        pairs = pairs[:1] if eqn.primitive is lax.sub_p else pairs
        candidates = [_Step(eqn, before, added) for before, added in pairs if before is not added]
    else:
        candidates = [_Step(eqn, before) for before in _scaled(eqn)]
    for step in candidates:
        if step.stream in inputs:
            return [step]
        if before := _stream(flow, inputs, step.stream):
            return [*before, step]
    return []


def _scaled(eqn: Any) -> list[Any]:
    """The operand of a product or a quotient with a number, in a list; empty for other equations."""
    row = primitive(eqn.primitive.name)
    arrays = variables(eqn.invars)
    is_scaling = row.scales and len(eqn.invars) == 2 and len(arrays) == 1 and tracked(eqn.outvars[0])
    return arrays if is_scaling and (row.linear != "first" or arrays[0] is eqn.invars[0]) else []
