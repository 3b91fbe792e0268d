"""Reruns forward passes that overflow float16 in float32.

A forward pass in half may give inf or NaN where float32 is finite, for example in a printed loss or in batch
statistics. No loss scale helps there. The function then runs again as the script wrote it, and its results replace
those in half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp

import mpjax
from mpjax._jaxpr import compat
from mpjax._jaxpr.program import Site, site_of, sub_jaxprs
from mpjax._jaxpr.source import scopes
from mpjax.launcher.retrying import all_finite, behind, is_key, varying_axes
from mpjax.launcher.session import Session, differentiating, is_tracer

# The named scope of a rerun. Operations in it run only after an overflow.
SCOPE = "mpjax_in_float32"


def finite_results(session: Session, fun: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> tuple[Any, Any]:
    """The results of a function in half if all are finite, otherwise its results in float32.

    Args:
        session: The session of this process.
        fun, args, kwargs: The call, not under autocast.
        out: The result of the call in half, a tree.

    Returns:
        The tree, and whether the function ran again, a bool of shape ().
    """
    leaves, tree = jax.tree.flatten(out)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not is_key(x)]
    if not session.reruns or not any(jnp.issubdtype(leaves[i].dtype, jnp.inexact) for i in places):
        return out, jnp.zeros((), jnp.bool_)
    inputs, inputs_tree = jax.tree.flatten((args, kwargs))
    halves = [leaves[i] for i in places]

    def rerun(inputs: list[Any]) -> list[Any]:
        # Rebuild the arguments, so that a function that mutates them (NNX) mutates copies.
        args, kwargs = jax.tree.unflatten(inputs_tree, inputs)
        with differentiating(jnp.ones((), jnp.float32)), mpjax.autocast_disabled():
            outs = jax.tree.leaves(fun(*args, **kwargs))
        return [_like(outs[i], half) for i, half in zip(places, halves, strict=True)]

    finite = all_finite(halves)
    if not is_tracer(finite):
        values = halves if bool(finite) else rerun(inputs)
    else:
        axes = {axis for x in halves for axis in varying_axes(x)}
        kept = [compat.vary(_strong(x), tuple(axes)) for x in halves]
        run = _in_a_loop if jax.extend.core.unsafe_am_i_under_a_vmap_DO_NOT_USE() else _in_a_branch
        with jax.named_scope(SCOPE):
            values = run(finite, lambda inputs: [compat.vary(x, tuple(axes)) for x in rerun(inputs)], inputs, kept)
    for i, value in zip(places, values, strict=True):
        leaves[i] = compat.with_weak_type(value, jax.typeof(leaves[i]))
    return jax.tree.unflatten(tree, leaves), ~finite


def running_sites(jaxpr: Any, around: Site | None = None) -> Iterator[Site]:
    """Yields the equations of a program and its sub-jaxprs, except those that run only after an overflow."""
    for eqn in compat.open_jaxpr(jaxpr).jaxpr.eqns:
        yield from running_sites_of(eqn, around)


def running_sites_of(eqn: Any, around: Site | None = None) -> Iterator[Site]:
    """Yields an equation and those in its sub-jaxprs, unless they run only after an overflow."""
    if SCOPE in scopes(eqn):
        return
    site = site_of(eqn, around)
    yield site
    for inner in sub_jaxprs(eqn):
        yield from running_sites(inner.jaxpr, site)


def _in_a_branch(finite: Any, rerun: Callable[..., Any], inputs: list[Any], kept: list[Any]) -> list[Any]:
    return jax.lax.cond(finite, lambda: kept, lambda: rerun(inputs))


def _in_a_loop(finite: Any, rerun: Callable[..., Any], inputs: list[Any], kept: list[Any]) -> list[Any]:
    """Runs `again` in a loop of at most one iteration: `vmap` turns a branch into a `select`, which runs both sides."""
    places = [i for i, x in enumerate(inputs) if isinstance(x, jax.Array)]

    def body(carry: Any) -> Any:
        held = list(inputs)
        for i, x in zip(places, behind(carry[0].astype(jnp.float32), [inputs[i] for i in places]), strict=True):
            held[i] = x
        return jnp.ones((), jnp.bool_), rerun(held)

    return jax.lax.while_loop(lambda carry: ~carry[0], body, (finite, kept))[1]


def _like(value: Any, half: Any) -> Any:
    return _strong(jnp.asarray(value).astype(half.dtype))


def _strong(x: Any) -> Any:
    return jax.lax.convert_element_type(x, x.dtype)
