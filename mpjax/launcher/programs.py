"""The script's compiled functions: those that train, with their loss scales, and those that only evaluate."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax.launcher.report import Clock
from mpjax.launcher.session import CALLS, Session, enclosing_scale, frame
from mpjax.program import compat
from mpjax.program.source import name_of

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
        self.trains = self.receives = False
        # Of the gradients that it hands out: their leaves, those that an update has received since the last call, and
        # those in each result. The arguments that go to an update.
        self.hands_out = self.received = 0
        self.outputs, self.receiving = list[int](), list[int]()
        self._derived: dict[Any, Compiled] = {}
        self._make()

    def _make(self) -> None:
        """Makes the functions under the policy, which JAX then traces."""
        self.early = self.unguarded = False  # whether a trace could not tell if it evaluates, or left updates unguarded
        self._plain = self._jit(under_policy(self._session, self._fun, self), **self._options)
        # By whether the gradients that it hands out are in half.
        self._stateful = {half: self._with_states(half) for half in (False, True)}
        self._functions = [fun for fun in (self._untouched, self._plain, *self._stateful.values()) if fun is not None]

    def _with_states(self, hands_out_half: bool) -> Any:
        """The function with the loss scales; None if it can't take them: JAX takes no keyword beside in_shardings."""
        if self._options.get("in_shardings") is not None:
            return None
        shardings = {name: (given, None) for name, given in self._options.items() if name == "out_shardings"}
        program = under_policy(self._session, self._fun, self, hands_out_half)
        program.__signature__ = _signature(self._fun)  # type: ignore[attr-defined]
        return self._jit(program, **(self._options | shardings))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, clock = self._session, self.clock
        if frame() is not None or enclosing_scale() is not None:
            # A new function for each trace: JAX would cache what this one reads from the enclosing trace.
            return self._jit(functools.partial(self._fun), **self._options)(*args, **kwargs)
        if not session.casts:
            return self._untouched(*args, **kwargs)
        leaves = jax.tree.leaves((args, kwargs)) if session.hands else []
        self.receives = self.receives or any(session.handed.get(x) is not None for x in leaves)
        if (self.early and session.parameters) or (self.unguarded and (session.sites or self.receives)):
            self._make()
        if self._stateful[False] is None or compat.is_tracing():
            return self._plain(*args, **kwargs)
        half = self._hands_out_half(leaves)
        states = session.initial_states() if clock.counts is None else _beside(clock.counts, (args, kwargs))
        out, clock.counts = self._stateful[half](*args, **kwargs, **{_STATES: states})
        if self.trains and (half or not self.hands_out):
            if clock.tick():
                session.warn_of_skips(clock.name, np.asarray(clock.counts)[:, CALLS:].sum(0))
            if clock.calls == 1:
                session.steps.append(clock)
        if session.hands:
            self._hand_out(jax.tree.leaves(out), jax.tree.leaves((args, kwargs)), half)
        return out

    def _hands_out_half(self, leaves: Sequence[Any]) -> bool:
        """Whether the gradients that it hands out may be in half.

        Those of the call before have all gone to an update, and it is given parameters that come from one.
        """
        self.received, received = 0, self.received
        if self.hands_out & ~received:
            return False
        updated = sum(self._session.updated.get(x) is not None for x in leaves)
        return updated >= self.hands_out.bit_count() > 0

    def _hand_out(self, outs: Sequence[Any], leaves: Sequence[Any], half: bool) -> None:
        """Notes which results of a call are gradients or updated parameters, and which arguments went to an update."""
        session = self._session
        if self.receiving:
            session.receive(leaves[i] for i in self.receiving)
            session.updated.add(outs, True)
        for x, handed in zip(outs, self.outputs, strict=False):
            if handed:
                session.handed.add([x], (self, handed))
        self.clock.in_float32 += bool(self.hands_out) and not half

    def derived(self, key: Any, gradient: Callable[..., Any]) -> Compiled:
        """The compiled gradient of this function, which the script did not compile: one for each `key`."""
        if key not in self._derived:
            static = {name: value for name, value in self._options.items() if name.startswith("static_arg")}
            self._derived[key] = Compiled(self._session, self._jit, gradient, static)
        return self._derived[key]

    def __reduce__(self) -> Any:
        return compiled_again, (self._fun, self._options)  # In the process that reads it, under its policy.

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
    trace = property(lambda self: self._untouched.trace)  # what an export saves
    lower = property(lambda self: self._current().lower)
    eval_shape = property(lambda self: self._current().eval_shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_plain" not in vars(self):
            raise AttributeError(name)
        return getattr(self._current(), name)

    def __repr__(self) -> str:
        return repr(self._untouched)


def compiled_again(fun: Callable[..., Any], options: dict[str, Any]) -> Any:
    """A compiled function that was copied or pickled."""
    return jax.jit(fun, **options)


def under_policy(
    session: Session, fun: Callable[..., Any], compiled: Compiled | None = None, hands_out_half: bool = False
) -> Callable[..., Any]:
    """Wraps `fun` for `jit` or `pmap`, so that its gradients and forward passes run under autocast where they may.

    Args:
        session: The session of this process.
        fun: The function.
        compiled: The compiled function, if it is one. It may pass the loss scales as a keyword argument, for which the
            wrapped function returns them too.
        hands_out_half: Whether gradients that the program hands out may be in half.
    """

    @functools.wraps(fun)
    def program(*args: Any, **kwargs: Any) -> Any:
        states = kwargs.pop(_STATES, None)
        if frame() is not None or enclosing_scale() is not None or not session.casts:
            return fun(*args, **kwargs)
        from mpjax.launcher.decisions import Program

        out, new = Program(session, fun, args, kwargs, compiled).run(states, hands_out_half)
        return out if states is None else (out, new)

    return program


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
