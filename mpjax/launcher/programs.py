"""The script's compiled functions: those that train, with their loss scales, and those that only evaluate."""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core
import numpy as np

from mpjax.launcher.report import Clock
from mpjax.launcher.session import Frame, Session, enclosing_scale, frame, tracing
from mpjax.program import compat
from mpjax.program.source import is_library_file

_STATES = "_mpjax_loss_scales"


class Compiled:
    """The result of the launcher's `jax.jit`: `jax.jit(fun, **options)`, and once the process trains, under the policy.

    The compiled function then takes and returns the loss scales as an additional argument and result that the caller
    does not see.
    """

    def __init__(self, session: Session, jit: Callable[..., Any], fun: Callable[..., Any], options: dict[str, Any]):
        functools.update_wrapper(self, fun, updated=())
        self._session, self._jit, self._fun, self._options = session, jit, fun, options
        self._untouched = jit(fun, **options)
        self.clock = Clock(name_of(fun))  # The session keeps it, and not the data that the function closes over.
        self.trains = False
        self._derived: dict[Any, Compiled] = {}
        self._make()

    def _make(self) -> None:
        """Makes the functions under the policy, which JAX then traces."""
        self.decided = True  # False if a trace could not tell whether the function evaluates
        self._plain = self._jit(under_policy(self._session, self._fun), **self._options)
        shardings = {name: (given, None) for name, given in self._options.items() if name == "out_shardings"}
        # JAX takes no keyword arguments beside in_shardings.
        takes_states = self._options.get("in_shardings") is None
        stateful = under_policy(self._session, self._fun, self)
        self._stateful = self._jit(stateful, **(self._options | shardings)) if takes_states else None
        self._functions = [fun for fun in (self._untouched, self._plain, self._stateful) if fun is not None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if frame() is not None or enclosing_scale() is not None:
            # A new function for each trace: JAX would cache what this one reads from the enclosing trace.
            return self._jit(functools.partial(self._fun), **self._options)(*args, **kwargs)
        if not self._session.casts:
            return self._untouched(*args, **kwargs)
        if not self.decided and self._session.parameters:
            self._make()
        if self._stateful is None or compat.is_tracing():
            return self._plain(*args, **kwargs)
        clock = self.clock
        states = self._session.initial_states() if clock.counts is None else _beside(clock.counts, (args, kwargs))
        out, clock.counts = self._stateful(*args, **kwargs, **{_STATES: states})
        if self.trains:
            clock.tick()
            if clock.calls == 1:
                self._session.steps.append(clock)
        return out

    def derived(self, key: Any, gradient: Callable[..., Any]) -> Compiled:
        """The compiled gradient of this function, which the script did not compile: one for each `key`."""
        if key not in self._derived:
            static = {name: value for name, value in self._options.items() if name.startswith("static_arg")}
            self._derived[key] = Compiled(self._session, self._jit, gradient, static)
        return self._derived[key]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _cache_size(self) -> int:
        return sum(fun._cache_size() for fun in self._functions)

    def clear_cache(self) -> None:
        """Clears the caches of the compiled function."""
        for fun in self._functions:
            fun.clear_cache()

    def _current(self) -> Any:
        return self._plain if self._session.casts else self._untouched

    # `jax.export` looks for these on the class.
    trace = property(lambda self: self._current().trace)
    lower = property(lambda self: self._current().lower)
    eval_shape = property(lambda self: self._current().eval_shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_plain" not in vars(self):
            raise AttributeError(name)
        return getattr(self._current(), name)

    def __repr__(self) -> str:
        return repr(self._untouched)


def name_of(fun: Any) -> str:
    """The name of a function with its line in the script, as `step (train.py:12)`: several may have one name."""
    name, code = getattr(fun, "__name__", type(fun).__name__), getattr(inspect.unwrap(fun), "__code__", None)
    if code is None or is_library_file(code.co_filename):
        return name
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def under_policy(session: Session, fun: Callable[..., Any], compiled: Compiled | None = None) -> Callable[..., Any]:
    """Wraps `fun` for `jit` or `pmap`: if it evaluates the training's parameters, it runs under autocast.

    With `compiled`, the wrapped function takes the loss scales as an additional keyword argument and returns them too.
    """

    @functools.wraps(fun)
    def program(*args: Any, **kwargs: Any) -> Any:
        states = kwargs.pop(_STATES, None)
        if frame() is not None or enclosing_scale() is not None or not session.casts:
            return fun(*args, **kwargs)
        return under_autocast(session, fun, args, kwargs, states, compiled)

    if compiled is not None:
        program.__signature__ = _signature(fun)  # type: ignore[attr-defined]
    return program


def under_autocast(
    session: Session, fun: Callable[..., Any], args: Any, kwargs: Any, states: Any, compiled: Compiled | None
) -> Any:
    """Traces a program to see whether it trains or evaluates, and returns its result under the policy."""
    from mpjax.launcher.casts import running_sites
    from mpjax.launcher.outside import in_half, is_differentiated
    from mpjax.program.tracing import is_array, trace

    seen = Frame(name_of(fun))

    def with_states(states: Any, args: Any, kwargs: Any) -> Any:
        seen.states = None if states is None else jax.new_ref(states)
        with tracing(seen):
            out = fun(*args, **kwargs)
        states = None if states is None else seen.states[...]
        seen.states, seen.finite = None, []  # Tracers must not outlive the trace.
        return out, states

    traced = trace(with_states, (states, args, kwargs), {}, None)
    sites = [site for site in running_sites(traced.jaxpr) if site.flops]
    trains = seen.differentiates or seen.optimizes or is_differentiated(sites)
    leaves = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    arrays = [(path, leaf) for path, leaf in leaves if is_array(leaf)]
    parameters = session.parameters.among(arrays)
    jaxpr = traced.jaxpr
    if parameters and session.active and (seen.differentiates or not trains):
        inputs = compat.open_jaxpr(jaxpr).jaxpr.invars[-len(arrays) :]
        jaxpr = in_half(session, jaxpr, {inputs[i] for i in parameters})
    seen.evaluates = not trains and jaxpr is not traced.jaxpr
    for watch in session.watchers:
        watch(seen, jaxpr)
    if compiled is not None:
        compiled.trains = compiled.trains or seen.differentiates
        compiled.decided = trains or not sites or bool(session.parameters)
    out, states = traced.rebuild(jax.extend.core.jaxpr_as_fun(jaxpr)(*traced.arrays))
    return out if compiled is None else (out, states)


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


def _beside(states: Any, args: Any) -> Any:
    """State rows on the devices of a call's arguments: one step may train a model on each device."""
    if not states.committed:
        return states
    first = next((x for x in jax.tree.leaves(args) if isinstance(x, jax.Array) and x.committed), None)
    if first is None:
        return jax.device_put(np.asarray(states))
    here, there = (tuple(x.sharding.devices_indices_map(x.shape)) for x in (states, first))
    everywhere = jax.NamedSharding(jax.sharding.Mesh(np.array(there), "devices"), jax.P())
    return states if here == there else jax.device_put(states, everywhere)
