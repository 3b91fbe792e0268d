"""The dataflow of a program: which equation makes each value, and which read it.

It is read in one place, for jaxprs, plans and inlined programs alike. What follows from values in program order (their
contents, bounds, dependences) is a rule for `evaluate`.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from mpjax.program import compat

_T = TypeVar("_T")


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
        self.eqns, self.outvars = tuple(eqns), tuple(outvars)

    @functools.cached_property
    def returned(self) -> frozenset[Any]:
        """The outputs that are not literals."""
        return frozenset(variables(self.outvars))

    @property
    def free(self) -> list[Any]:
        """The values that it reads and does not make."""
        return [v for v in self.readers if v not in self.maker_of]

    @functools.cached_property
    def maker_of(self) -> dict[Any, Any]:
        """The equation that makes each value; inputs, constants and literals have none."""
        return {v: eqn for eqn in self.eqns for v in eqn.outvars}

    @functools.cached_property
    def _places(self) -> dict[Any, int]:
        """The place in the program of the equation that makes each value."""
        return {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}

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

    def place(self, eqn: Any) -> int:
        """The place of an equation among all; -1 for one without results."""
        return self._places[eqn.outvars[0]] if eqn.outvars else -1

    def source(self, v: Any, passes: Callable[[Any], bool]) -> Any:
        """The value before the equations that only pass it on: their first operand that is not a literal."""
        while (eqn := self.maker(v)) is not None and passes(eqn) and (operands := variables(eqn.invars)):
            v = operands[0]
        return v

    def reached(self, ends: Iterable[Any], start: Any = None) -> Iterator[Any]:
        """The values on which some depend, with these, each once; not those before the value `start`."""
        waiting, known = variables(ends), set()
        while waiting:
            v = waiting.pop()
            if v not in known:
                known.add(v)
                yield v
                eqn = None if v is start else self.maker(v)
                waiting.extend(() if eqn is None else variables(eqn.invars))

    def made_by(self, ends: Iterable[Any], through: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
        """The equations that make values, nearest first, and those that make the operands that `through` returns."""
        waiting, known = collections.deque(ends), set()
        while waiting:
            eqn = self.maker(waiting.popleft())
            if eqn is not None and id(eqn) not in known:
                known.add(id(eqn))
                yield eqn
                waiting.extend(through(eqn))

    def depends(self, ends: Iterable[Any], start: Any) -> bool:
        """Whether some values depend on the value `start`, or one of them is it."""
        first, waiting, known = self._places.get(start, -1), variables(ends), set()
        while waiting:
            v = waiting.pop()
            if v is start:
                return True
            place = self._places.get(v, -1)
            if place > first and v not in known:  # What is made before it does not depend on it.
                known.add(v)
                waiting.extend(variables(self.eqns[place].invars))
        return False

    def before(self, ends: Iterable[Any], start: Any = None) -> list[Any]:
        """The equations on which values depend, in order, up to the value `start`."""
        needed = {id(self.maker(v)) for v in self.reached(ends, start) if v is not start}
        return [eqn for eqn in self.eqns if id(eqn) in needed]

    def after(self, *starts: Any) -> set[Any]:
        """The values that depend on some values, with these."""
        after = set(starts)
        for eqn in self.eqns:
            if not after.isdisjoint(variables(eqn.invars)):
                after.update(eqn.outvars)
        return after

    def between(self, start: Any, end: Any) -> list[Any]:
        """The equations by which a value depends on another, in order."""
        after = self.after(start)
        return [eqn for eqn in self.before([end], start) if not after.isdisjoint(variables(eqn.invars))]


def once_per_jaxpr(fun: Callable[[Any], _T]) -> Callable[[Any], _T]:
    """Caches a function of an open jaxpr while the jaxpr lives. Its results must not hold the jaxpr."""
    known: weakref.WeakKeyDictionary[Any, _T] = weakref.WeakKeyDictionary()

    @functools.wraps(fun)
    def cached(jaxpr: Any) -> _T:
        jaxpr = compat.open_jaxpr(jaxpr).jaxpr
        if jaxpr not in known:
            known[jaxpr] = fun(jaxpr)
        return known[jaxpr]

    return cached


@once_per_jaxpr
def dataflow(jaxpr: Any) -> Dataflow:
    """The dataflow of an open or closed jaxpr, without its sub-jaxprs."""
    return Dataflow(jaxpr.eqns, jaxpr.outvars)


def live_equations(jaxpr: Any) -> list[Any]:
    """The equations of an open jaxpr whose results are read, or that have effects."""
    live, eqns = set(variables(jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(variables(eqn.invars))
            eqns.append(eqn)
    return eqns[::-1]
