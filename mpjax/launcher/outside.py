"""Runs forward passes that lie outside of gradients in half precision too.

An evaluation is such a pass. In a training step, a GAN samples its generator, and a Q-learner evaluates its target
network, and the loss uses the results as data. Among the operations that do not depend on a gradient, the matmuls that
combine parameters with data, and everything computed from them, run under autocast.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax.extend.core
import jax.numpy as jnp

from mpjax.launcher.casts import SCOPE, CastCall, running_sites
from mpjax.launcher.session import Session
from mpjax.program import compat
from mpjax.program.evaluator import bind_in_context, evaluate
from mpjax.program.graph import Site, site_of, sub_jaxprs
from mpjax.program.primitives import primitive
from mpjax.program.source import scopes


class _Part(NamedTuple):
    """Some equations of a program, and the variables that are read from them."""

    eqns: Sequence[Any]
    outvars: Sequence[Any]


def in_half(session: Session, jaxpr: Any, parameters: Collection[Any]) -> Any:
    """Puts the forward passes outside gradients in half. Returns `jaxpr` itself if there are none.

    Args:
        session: The session of this process.
        jaxpr: A closed jaxpr whose gradients are already in half.
        parameters: Its inputs that are parameters of the training. Only passes that read them are cast.
    """
    opened = compat.open_jaxpr(jaxpr)
    before, passes, after = _parted(opened.jaxpr.eqns, parameters)
    if not passes:
        return jaxpr
    read = {v for eqn in after for v in eqn.invars if _is_variable(v)} | set(filter(_is_variable, opened.jaxpr.outvars))
    made = [v for eqn in passes for v in eqn.outvars if v in read]
    defined = {v for eqn in passes for v in eqn.outvars}
    given = list(dict.fromkeys(v for e in passes for v in e.invars if _is_variable(v) and v not in defined))

    def forward(*arrays: Any) -> list[Any]:
        return evaluate(_Part(passes, made), dict(zip(given, arrays, strict=True)), bind_in_context)

    def program(*arrays: Any) -> list[Any]:
        variables = (*opened.jaxpr.constvars, *opened.jaxpr.invars)
        env: dict[Any, Any] = dict(zip(variables, (*opened.consts, *arrays), strict=True))
        inputs = evaluate(_Part(before, given), env, bind_in_context)
        call = CastCall(session, forward, inputs, {})
        outs, _ = call.finite(call.in_half(jnp.ones((), jnp.float32), inputs, {}))
        env.update(zip(made, outs, strict=True))
        return evaluate(_Part(after, opened.jaxpr.outvars), env, bind_in_context)

    return compat.trace(program, *(compat.example(v.aval) for v in opened.jaxpr.invars))


def is_differentiated(sites: Iterable[Site]) -> bool:
    """Whether differentiation made one of these operations. JAX marks linearized operations in their name stack."""
    return any("jvp(" in site.module for site in sites)


def _parted(eqns: Sequence[Any], parameters: Collection[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits operations into those before forward passes, the passes with what depends only on them, and the rest."""
    before, passes, after = [], [], []
    of_passes: set[Any] = set()
    late: set[Any] = set()
    origins = dict.fromkeys(parameters, _PARAMETERS)
    for eqn in eqns:
        reads = {v for v in eqn.invars if _is_variable(v)}
        given = [_origin(v, origins) for v in eqn.invars]
        origins.update(dict.fromkeys(eqn.outvars, functools.reduce(operator.or_, given, 0)))
        if eqn.effects or reads & late or is_differentiated(running_sites(_Part([eqn], ()))):
            after.append(eqn)
            late.update(eqn.outvars)
        elif reads & of_passes or _applies_parameters(eqn, given):
            passes.append(eqn)
            of_passes.update(eqn.outvars)
        else:
            before.append(eqn)
    return before, passes, after


# What a value is computed from.
_PARAMETERS, _DATA = 1, 2


def _origin(v: Any, origins: dict[Any, int]) -> int:
    return origins.get(v, _DATA) if _is_variable(v) else 0


def _applies_parameters(eqn: Any, given: Sequence[int]) -> bool:
    """Whether a matmul in an equation combines parameters with data. A Gram matrix of weights is no forward pass.

    Args:
        eqn: The equation.
        given: The origins of its operands.
    """
    every = functools.reduce(operator.or_, given, 0)
    if every != _PARAMETERS | _DATA or SCOPE in scopes(eqn):
        return False
    inner = sub_jaxprs(eqn)
    if not inner:
        return bool(site_of(eqn).flops)
    is_loop = primitive(eqn.primitive.name).loop
    for sub in inner:
        ins = [every if i is None or (is_loop and n >= sub.consts) else given[i] for n, i in enumerate(sub.operands)]
        origins = dict(zip(sub.opened.invars, ins, strict=True))
        for other in sub.opened.eqns:
            reads = [_origin(v, origins) for v in other.invars]
            if _applies_parameters(other, reads):
                return True
            origins.update(dict.fromkeys(other.outvars, functools.reduce(operator.or_, reads, 0)))
    return False


def _is_variable(v: Any) -> bool:
    return not isinstance(v, jax.extend.core.Literal)
