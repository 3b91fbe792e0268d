"""Decides what of a compiled function of the script runs in half, from one trace of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from mpjax.kernels import staging
from mpjax.launcher.casts import running_sites
from mpjax.launcher.outside import in_half, is_differentiated
from mpjax.launcher.session import Frame, Gradient, Session, tracing
from mpjax.program import compat
from mpjax.program.fates import Fates, fates
from mpjax.program.source import name_of
from mpjax.program.tracing import TracedCall, is_array, trace


class Program:
    """A call of a compiled function that is being traced: its gradients, their fates, and its forward passes.

    Args:
        session: The session of this process.
        fun, args, kwargs: The call.
        compiled: The `Compiled` of the function, which is told what it hands out and receives; None in a `pmap`.
    """

    def __init__(self, session: Session, fun: Callable[..., Any], args: Any, kwargs: Any, compiled: Any):
        self.session, self.fun, self.call, self.compiled = session, fun, (args, kwargs), compiled
        self.guards = bool(session.sites) or (compiled is not None and compiled.receives)

    def run(self, states: Any, hands_out_half: bool) -> Any:
        """The result and the next states. The first trace shows which gradients stay in float32 in the second."""
        session, compiled = self.session, self.compiled
        seen, traced = self._traced(states, ())
        if seen.gradients and not session.any_gradient:
            fate = fates(traced.jaxpr)
            handing = [g for g in seen.gradients if not fate.is_updated(g.number) and fate.handed_out(g.number)]
            self._hand_out(fate, handing, traced)
            cast = [g for g in seen.gradients if fate.is_updated(g.number) or (hands_out_half and g in handing)]
            if len(cast) < len(seen.gradients):
                seen, traced = self._traced(states, {g.number for g in seen.gradients if g not in cast})
        elif seen.optimizes and session.hands:
            self._hand_out(fates(traced.jaxpr), [], traced)
        session.record(seen)
        jaxpr = self._with_passes(seen, traced)
        for watch in session.watchers:
            watch(seen, jaxpr)
        if compiled is not None:
            compiled.trains = compiled.trains or bool(seen.gradients)
            compiled.unguarded = seen.unguarded
        opened = compat.open_jaxpr(jaxpr)
        return traced.rebuild(staging.evaluate_again(opened.jaxpr, (*opened.consts, *traced.arrays)))

    def _traced(self, states: Any, in_float32: Collection[int]) -> tuple[Frame, TracedCall]:
        seen = Frame(name_of(self.fun), in_float32, self.guards)

        def with_states(args: Any, kwargs: Any, states: Any) -> Any:
            seen.states = None if states is None else jax.new_ref(states)
            with tracing(seen):
                out = self.fun(*args, **kwargs)
            states = None if states is None else seen.states[...]
            seen.states = None  # Tracers must not outlive the trace.
            return out, states

        return seen, trace(with_states, (*self.call, states), {}, None)

    def _hand_out(self, fate: Fates, handing: Sequence[Gradient], traced: TracedCall) -> None:
        """Tells the compiled function which of its results are gradients, and which arguments go to an update."""
        compiled = self.compiled
        if compiled is None:
            return
        compiled.hands_out = sum(fate.handed_out(g.number) for g in handing)
        self.session.hands = self.session.hands or bool(handing)
        out, _ = traced.rebuild([frozenset([leaves & compiled.hands_out]) for leaves in fate.outputs])
        compiled.outputs = [min(x) if isinstance(x, frozenset) else 0 for x in jax.tree.leaves(out)]
        places = [i for i, x in enumerate(jax.tree.leaves(self.call)) if is_array(x)]
        compiled.receiving = [places[i] for i in fate.receiving if i < len(places)]  # not the states

    def _with_passes(self, seen: Frame, traced: TracedCall) -> Any:
        """The program with its forward passes in half, if they may be."""
        session, jaxpr = self.session, traced.jaxpr
        sites = [site for site in running_sites(jaxpr) if site.flops]
        trains = bool(seen.gradients) or seen.optimizes or is_differentiated(sites)
        arrays = [(path, x) for path, x in jax.tree_util.tree_flatten_with_path(self.call)[0] if is_array(x)]
        parameters = session.parameters.among(arrays)
        if parameters and (bool(seen.gradients) or (not trains and session.options.evaluations)):
            inputs = compat.open_jaxpr(jaxpr).jaxpr.invars
            jaxpr = in_half(session, jaxpr, {inputs[i] for i in parameters})
        seen.evaluates = not trains and jaxpr is not traced.jaxpr
        if self.compiled is not None:
            self.compiled.early = session.options.evaluations and not (trains or not sites or session.parameters)
        return jaxpr
