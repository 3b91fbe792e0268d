"""Runs forward passes that lie outside of gradients in half precision too.

An evaluation is such a pass. In a training step, a GAN samples its generator, and a Q-learner evaluates its target
network, and the loss uses the results as data. Among the operations that do not depend on a gradient, the matmuls that
read parameters and everything computed from them run under autocast.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax.extend.core
import jax.numpy as jnp

from mpjax._jaxpr import compat
from mpjax._jaxpr.evaluator import bind_in_context, evaluate
from mpjax._jaxpr.program import Site
from mpjax.launcher.calls import Call, running_sites_of
from mpjax.launcher.session import Session


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
        call = Call(session, forward, inputs, {})
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
    of_parameters = set(parameters)
    for eqn in eqns:
        sites: list[Site] = list(running_sites_of(eqn))
        reads = {v for v in eqn.invars if _is_variable(v)}
        if reads & of_parameters:
            of_parameters.update(eqn.outvars)
        if eqn.effects or reads & late or is_differentiated(sites):
            after.append(eqn)
            late.update(eqn.outvars)
        elif reads & of_passes or (reads & of_parameters and any(site.flops for site in sites)):
            passes.append(eqn)
            of_passes.update(eqn.outvars)
        else:
            before.append(eqn)
    return before, passes, after


def _is_variable(v: Any) -> bool:
    return not isinstance(v, jax.extend.core.Literal)
