"""The script's compiled functions: those that train, with their loss scales, and those that only evaluate."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core

import mpjax
from mpjax._jaxpr import compat
from mpjax.launcher.outside import in_half, is_differentiated
from mpjax.launcher.report import Clock
from mpjax.launcher.reruns import finite_results, running_sites
from mpjax.launcher.session import Frame, Session, enclosing_scale, frame, tracing

_STATES = "_mpjax_loss_scales"


class Compiled:
    """The result of the launcher's `jax.jit`: `jax.jit(fun, **options)` with the loss scales of the function.

    The compiled function takes and returns the loss scales as an additional argument and result that the caller does
    not see.
    """

    def __init__(self, session: Session, jit: Callable[..., Any], fun: Callable[..., Any], options: dict[str, Any]):
        functools.update_wrapper(self, fun, updated=())
        self._session, self._jit, self._fun, self._options = session, jit, fun, options
        self._plain = jit(under_policy(session, fun), **options)
        # JAX takes no keyword arguments beside in_shardings.
        self._stateful = None if options.get("in_shardings") is not None else self._with_states()
        self._states: Any = None
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self.clock = Clock()
        self.trains = False

    @property
    def counts(self) -> Any:
        """The state rows of the function, loss scales and counters; None if it has not run."""
        return self._states

    def _with_states(self) -> Any:
        options = dict(self._options)
        if "out_shardings" in options:
            options["out_shardings"] = (options["out_shardings"], None)
        return self._jit(under_policy(self._session, self._fun, self), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if frame() is not None or enclosing_scale() is not None:
            # A new function for each trace: JAX would cache what this one reads from the enclosing trace.
            return self._jit(_fresh(self._fun), **self._options)(*args, **kwargs)
        if self._stateful is None or jax.extend.core.unsafe_am_i_under_a_jit_DO_NOT_USE():
            return self._plain(*args, **kwargs)
        if self._states is None:
            self._states = self._session.initial_states()
        out, self._states = self._stateful(*args, **kwargs, **{_STATES: self._states})
        if self.trains:
            self.clock.tick()
            self._session.step_finished(self)
        return out

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_plain" not in vars(self):
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __repr__(self) -> str:
        return repr(self._plain)


def under_policy(session: Session, fun: Callable[..., Any], compiled: Compiled | None = None) -> Callable[..., Any]:
    """Wraps `fun` for `jit` or `pmap`: it runs under autocast unless it differentiates or takes an optimizer step.

    With `compiled`, the wrapped function takes the loss scales as an additional keyword argument and returns them too.
    """

    @functools.wraps(fun)
    def program(*args: Any, **kwargs: Any) -> Any:
        states = kwargs.pop(_STATES, None)
        if frame() is not None or enclosing_scale() is not None:
            return fun(*args, **kwargs)
        return trace(session, fun, args, kwargs, states, compiled)

    if compiled is not None:
        program.__signature__ = _signature(fun)  # type: ignore[attr-defined]
    return program


def trace(
    session: Session, fun: Callable[..., Any], args: Any, kwargs: Any, states: Any, compiled: Compiled | None
) -> Any:
    """Traces a program to see whether it trains or evaluates, and returns its result under the policy."""
    seen = Frame(getattr(fun, "__name__", type(fun).__name__))
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    made: dict[str, Any] = {}

    def flat(states: Any, *arrays: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        seen.states = None if states is None else jax.new_ref(states)
        with tracing(seen):
            outs, made["tree"] = jax.tree.flatten(fun(*args, **kwargs))
        return outs, None if states is None else seen.states[...]

    arrays = [leaves[i] for i in places]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpjax.AutocastWarning)
        jaxpr = compat.trace(flat, states, *arrays)
        if seen.differentiates:
            jaxpr = in_half(session, jaxpr)
    trains = (
        seen.differentiates or seen.optimizes or is_differentiated(site for site in running_sites(jaxpr) if site.flops)
    )
    seen.evaluates = session.half != "float32" and not trains and any(site.flops for site in running_sites(jaxpr))
    session.traced(seen, jaxpr)
    stateful = compiled is not None
    if compiled is not None:
        compiled.trains = compiled.trains or seen.differentiates
    if not seen.evaluates:
        given = arrays if states is None else [states, *arrays]
        outs = jax.extend.core.jaxpr_as_fun(jaxpr)(*given)
        count = made["tree"].num_leaves
        out = jax.tree.unflatten(made["tree"], outs[:count])
        return (out, outs[count]) if stateful else out
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mpjax.AutocastWarning)
        with tracing(seen):
            out, _ = finite_results(session, fun, args, kwargs, session.autocast(fun)(*args, **kwargs))
    return (out, states) if stateful else out


def _signature(fun: Callable[..., Any]) -> inspect.Signature | None:
    """The signature by which JAX resolves argument names, with a parameter for the loss scales."""
    try:
        given = inspect.signature(fun)
    except (ValueError, TypeError):
        return None
    extra = inspect.Parameter(_STATES, inspect.Parameter.KEYWORD_ONLY)
    parameters = list(given.parameters.values())
    last = len(parameters) - any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return given.replace(parameters=[*parameters[:last], extra, *parameters[last:]])


def _fresh(fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def same(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return same
