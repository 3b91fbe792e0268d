"""The dataflow of a program: who makes and who reads each variable, and the values that depend on no input."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from mpjax.casting.attention.axes import Dims, Unfit, fresh, upstream
from mpjax.program import compat
from mpjax.program.evaluator import bind
from mpjax.program.primitives import primitive


class Inlined:
    """The dataflow of an open jaxpr without calls."""

    def __init__(self, jaxpr: Any, consts: Mapping[Any, Any] = MappingProxyType({})):
        self.jaxpr, self.consts = jaxpr, consts
        self._maker_of: dict[Any, Any] = {}
        self.readers: dict[Any, list[Any]] = {}
        self.visited: set[int] = set()  # The equations that a search has looked at, by `id`.
        self.returned = set(variables(jaxpr.outvars))
        self._values: dict[Any, Any] = dict(consts)
        live = set(self.returned)
        for eqn in reversed(jaxpr.eqns):
            if not eqn.effects and live.isdisjoint(eqn.outvars):
                continue
            self._maker_of.update((v, eqn) for v in eqn.outvars)
            for v in dict.fromkeys(variables(eqn.invars)):
                live.add(v)
                self.readers.setdefault(v, []).append(eqn)
        self._closed = set(consts)
        self._bits: set[Any] = set()  # What random bits determine, and no number that the program is given.
        from_floats = {v for v in (*jaxpr.invars, *jaxpr.constvars) if compat.is_inexact(v.aval)}
        for eqn in jaxpr.eqns:
            read = set(variables(eqn.invars))
            apart = eqn.effects or primitive(eqn.primitive.name).foreign or _communicates(eqn)
            if read <= self._closed and not apart:
                self._closed.update(eqn.outvars)
            if not read.isdisjoint(from_floats):
                from_floats.update(eqn.outvars)
            elif not read.isdisjoint(self._bits) or "random" in eqn.primitive.name or "threefry" in eqn.primitive.name:
                self._bits.update(eqn.outvars)

    def maker(self, v: Any) -> Any:
        """The equation that makes a variable; None for inputs, constants and literals."""
        eqn = None if isinstance(v, compat.Literal) else self._maker_of.get(v)
        self.visited.add(id(eqn))
        return eqn

    def stripped(self, v: Any, dims: Dims, casts: bool = False) -> tuple[Any, Dims]:
        """The variable before the moves that made this one, with its axes; before casts too, if `casts`."""
        while (eqn := self.maker(v)) is not None and (casts or not changes_dtype(eqn)):
            try:
                dims = upstream(eqn, dims)
            except Unfit:
                break
            v = eqn.invars[0]
        return v, dims

    def scalar(self, v: Any) -> float | None:
        """The value of all elements of a variable, if they are one number that depends on no input; else None."""
        if not isinstance(v, compat.Literal):
            v, _ = self.stripped(v, fresh(v.aval.shape), casts=True)
        value = self.constant(v) if v.aval.size == 1 else None
        return None if value is None else float(value.reshape(()))

    def is_random(self, v: Any) -> bool:
        """Whether random bits determine a variable, as they do the mask of a dropout."""
        return not isinstance(v, compat.Literal) and v in self._bits

    def constant(self, v: Any) -> np.ndarray | None:
        """The value of a variable that depends on no input; None for any other, or if only the program can make it."""
        if isinstance(v, compat.Literal):
            return np.asarray(v.val)
        if v not in self._closed:
            return None
        try:
            with jax.ensure_compile_time_eval():
                return np.asarray(self._value(v))
        except Exception:  # It is of devices of a mesh, or the program raises an error too.
            self._closed.discard(v)
            return None

    def _value(self, v: Any) -> Any:
        for eqn in self.makers(v) or ():
            if eqn.outvars[0] not in self._values:
                arrays = [x.val if isinstance(x, compat.Literal) else self._values[x] for x in eqn.invars]
                # Outside of its `shard_map`, a mark of a value that varies over devices is the identity.
                outs = arrays if eqn.primitive.name == "pvary" else bind(eqn, arrays)
                self._values.update(zip(eqn.outvars, outs, strict=True))
        return self._values[v]

    def makers(self, v: Any) -> list[Any] | None:
        """The equations that compute a variable from constants, in order; None if it depends on an input."""
        if isinstance(v, compat.Literal):
            return []
        return None if v not in self._closed else self._before([v])

    def ancestors(self, ends: list[Any]) -> set[Any]:
        """The variables on which some depend, with these, without those that depend on no input."""
        ancestors = {*ends, *(v for eqn in self._before(ends) for v in variables(eqn.invars))}
        return ancestors - self._closed

    def between(self, start: Any, end: Any) -> list[Any]:
        """The equations by which a variable depends on another, in order."""
        after, path = {start}, []
        for eqn in self._before([end], start):
            if not after.isdisjoint(variables(eqn.invars)):
                after.update(eqn.outvars)
                path.append(eqn)
        return path

    def _before(self, ends: Iterable[Any], start: Any = None) -> list[Any]:
        """The equations on which variables depend, in order, up to a variable."""
        waiting, needed = list(ends), set()
        while waiting:
            v = waiting.pop()
            eqn = None if v is start else self.maker(v)
            if eqn is not None and id(eqn) not in needed:
                needed.add(id(eqn))
                waiting.extend(variables(eqn.invars))
        return [eqn for eqn in self.jaxpr.eqns if id(eqn) in needed]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are not literals."""
    return [v for v in atoms if not isinstance(v, compat.Literal)]


def changes_dtype(eqn: Any) -> bool:
    """Whether an equation is a cast to another dtype."""
    return eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype


def _communicates(eqn: Any) -> bool:
    """Whether an equation has a meaning only inside its `shard_map`."""
    axes = (eqn.params.get("axis_name"), *(eqn.params.get("axes") or ()))
    return eqn.primitive.name != "pvary" and any(isinstance(axis, (str, tuple)) for axis in axes)
