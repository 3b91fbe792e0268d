"""The dataflow of a program: which equation makes each value, and which read it.

It is read in one place, for jaxprs, plans and inlined programs alike. What follows from values in program order (their
contents, bounds, dependences) is a rule for `evaluate`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from mpjax.program import compat


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are not literals."""
    return [v for v in atoms if not isinstance(v, compat.Literal)]


class Dataflow:
    """The makers and readers of a program's values.

    Args:
        eqns: Its equations, or a plan's steps, each with `invars` and `outvars`.
        outvars: Its outputs.
    """

    def __init__(self, eqns: Iterable[Any], outvars: Iterable[Any] = ()):
        self.eqns = tuple(eqns)
        self.returned = frozenset(variables(outvars))

    @functools.cached_property
    def maker_of(self) -> dict[Any, Any]:
        """The equation that makes each value; inputs, constants and literals have none."""
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    @functools.cached_property
    def readers(self) -> dict[Any, list[Any]]:
        """The equations that read each value, in program order, each once."""
        readers: dict[Any, list[Any]] = {}
        for eqn in self.eqns:
            for v in dict.fromkeys(variables(eqn.invars)):
                readers.setdefault(v, []).append(eqn)
        return readers

    def maker(self, v: Any) -> Any:
        """The equation that makes a value; None for inputs, constants and literals."""
        return None if isinstance(v, compat.Literal) else self.maker_of.get(v)

    def source(self, v: Any, passes: Callable[[Any], bool]) -> Any:
        """The value before the equations that only pass it on, which return their first operand."""
        while (eqn := self.maker(v)) is not None and passes(eqn):
            v = eqn.invars[0]
        return v

    def before(self, ends: Iterable[Any], start: Any = None) -> list[Any]:
        """The equations on which values depend, in order, up to the value `start`."""
        waiting, needed = list(ends), set()
        while waiting:
            v = waiting.pop()
            eqn = None if v is start else self.maker(v)
            if eqn is not None and id(eqn) not in needed:
                needed.add(id(eqn))
                waiting.extend(variables(eqn.invars))
        return [eqn for eqn in self.eqns if id(eqn) in needed]

    def between(self, start: Any, end: Any) -> list[Any]:
        """The equations by which a value depends on another, in order."""
        after, path = {start}, []
        for eqn in self.before([end], start):
            if not after.isdisjoint(variables(eqn.invars)):
                after.update(eqn.outvars)
                path.append(eqn)
        return path


_known: weakref.WeakKeyDictionary[Any, Dataflow] = weakref.WeakKeyDictionary()


def dataflow(jaxpr: Any) -> Dataflow:
    """The dataflow of an open or closed jaxpr, without its sub-jaxprs; read once."""
    jaxpr = compat.open_jaxpr(jaxpr).jaxpr
    if jaxpr not in _known:
        _known[jaxpr] = Dataflow(jaxpr.eqns, jaxpr.outvars)
    return _known[jaxpr]


def live_equations(jaxpr: Any) -> list[Any]:
    """The equations of an open jaxpr whose results are read, or that have effects."""
    live, eqns = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(variables(eqn.invars))
            eqns.append(eqn)
    return eqns[::-1]
