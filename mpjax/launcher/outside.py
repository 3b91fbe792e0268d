"""Runs forward passes that lie outside of gradients in half precision too.

In a training step, a GAN samples its generator, and a Q-learner evaluates its target network, and the loss uses the
results as data. Among the operations that do not depend on a gradient, the matmuls that combine parameters with data,
and everything computed from them, run under autocast, if gradients alone read the results. What else reads them may be
an accept test, a line search or a saved file, so evaluations are cast only with `--evaluations`. Solves never are.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from mpjax.launcher.casts import SCOPE, CastCall, running_sites
from mpjax.launcher.session import Session
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, variables
from mpjax.program.evaluator import bind_in_context, evaluate, run
from mpjax.program.graph import Site, site_of, sub_jaxprs, walk
from mpjax.program.primitives import primitive
from mpjax.program.source import scopes


class _Fact(NamedTuple):
    """What a value is computed from, and the latest of the parts of the program that it depends on."""

    origin: int
    part: int = 0


# A value's origin, from arguments; a constant's is neither.
_PARAMETERS, _DATA = 1, 2
# Before forward passes; the passes, with what depends only on them; the rest.
_BEFORE, _PASSES, _AFTER = range(3)


def in_half(session: Session, jaxpr: Any, parameters: Collection[Any]) -> Any:
    """Puts forward passes outside gradients in half. Returns `jaxpr` itself if there are none that may be.

    Args:
        session: The session of this process.
        jaxpr: A closed jaxpr whose gradients are already in half.
        parameters: Its inputs that are parameters of the training. Only passes that read them are cast.
    """
    opened = compat.open_jaxpr(jaxpr)
    parts = _parted(opened.jaxpr, parameters)
    after = Dataflow(parts[_AFTER], opened.jaxpr.outvars)
    rows = [primitive(site.name) for site in walk(Dataflow(parts[_PASSES]))]
    if not rows or any(row.decomposes or row.solve for row in rows):
        return jaxpr  # A solve multiplies a rounding by a condition number.
    passes = Dataflow(parts[_PASSES], after.free)
    if not session.options.evaluations and (_tests(passes) or not _are_data(passes, after)):
        return jaxpr
    given = passes.free
    made = [v for v in passes.maker_of if v in after.readers or v in after.returned]
    before, passes = Dataflow(parts[_BEFORE], given), Dataflow(parts[_PASSES], made)

    def forward(*arrays: Any) -> list[Any]:
        return evaluate(passes, dict(zip(given, arrays, strict=True)), bind_in_context)

    def program(*arrays: Any) -> list[Any]:
        ins = (*opened.jaxpr.constvars, *opened.jaxpr.invars)
        env: dict[Any, Any] = dict(zip(ins, (*opened.consts, *arrays), strict=True))
        inputs = evaluate(before, env, bind_in_context)
        call = CastCall(session, forward, inputs, {})
        outs, _ = call.finite(call.in_half(jnp.ones((), jnp.float32), inputs, {}))
        env.update(zip(made, outs, strict=True))
        return evaluate(after, env, bind_in_context)

    return compat.trace(program, *(compat.example(v.aval) for v in opened.jaxpr.invars))


def _tests(passes: Dataflow) -> bool:
    """Whether operations choose among values by comparing others. An activation chooses by the value itself."""
    for eqn in passes.eqns:
        row, (out, *_) = primitive(eqn.primitive.name), eqn.outvars or [None]
        readers = passes.readers.get(out, [])
        by_itself = readers and all(
            not set(variables(eqn.invars)).isdisjoint(variables(other.invars)) for other in readers
        )
        if row.chooses or (row.compares and (out in passes.returned or not by_itself)):
            return True
        if any(_tests(Dataflow(sub.opened.eqns, sub.opened.outvars)) for sub in sub_jaxprs(eqn)):
            return True
    return False


def _are_data(passes: Dataflow, after: Dataflow) -> bool:
    """Whether only gradients read the results: anything else may test, keep or save them."""
    made = passes.maker_of.keys()
    readers = (eqn for v in made for eqn in after.readers.get(v, ()))
    return after.returned.isdisjoint(made) and all(
        SCOPE in scopes(eqn) or is_differentiated(running_sites(Dataflow([eqn]))) for eqn in readers
    )


def is_differentiated(sites: Iterable[Site]) -> bool:
    """Whether differentiation made one of these operations. JAX marks linearized operations in their name stack."""
    return any("jvp(" in site.module for site in sites)


def _parted(jaxpr: Any, parameters: Collection[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """The operations of an open jaxpr by part."""
    parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])

    def rule(eqn: Any, given: Sequence[_Fact]) -> Sequence[_Fact]:
        latest = max((fact.part for fact in given), default=_BEFORE)
        if eqn.effects or latest == _AFTER or is_differentiated(running_sites(Dataflow([eqn]))):
            part = _AFTER
        else:
            part = _PASSES if latest == _PASSES or _applies_parameters(eqn, given) else _BEFORE
        parts[part].append(eqn)
        return [_Fact(_joined(given), part)] * len(eqn.outvars)

    ins = (_Fact(_PARAMETERS if v in parameters else _DATA) for v in (*jaxpr.constvars, *jaxpr.invars))
    run(jaxpr, ins, rule, constant=lambda literal, eqn: _Fact(0))
    return parts


def _joined(facts: Iterable[_Fact]) -> int:
    """The origins of all."""
    return functools.reduce(operator.or_, (fact.origin for fact in facts), 0)


def _applies_parameters(eqn: Any, given: Sequence[_Fact]) -> bool:
    """Whether a matmul in an equation combines parameters with data. A Gram matrix of weights is no forward pass.

    Args:
        eqn: The equation.
        given: The facts of its operands.
    """
    every = _joined(given)
    if every != _PARAMETERS | _DATA or SCOPE in scopes(eqn):
        return False
    inner = sub_jaxprs(eqn)
    if not inner:
        return bool(site_of(eqn).flops)
    found = False

    def rule(other: Any, operands: Sequence[_Fact]) -> Sequence[_Fact]:
        nonlocal found
        found = found or _applies_parameters(other, operands)
        return [_Fact(_joined(operands))] * len(other.outvars)

    is_loop = primitive(eqn.primitive.name).loop
    for sub in inner:
        ins = [
            _Fact(every) if i is None or (is_loop and n >= sub.consts) else given[i] for n, i in enumerate(sub.operands)
        ]
        run(sub.opened, [*[_Fact(_DATA)] * len(sub.opened.constvars), *ins], rule, lambda literal, eqn: _Fact(0))
    return found
