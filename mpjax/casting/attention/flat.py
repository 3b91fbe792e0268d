"""The dataflow of a program: who makes and who reads each variable, and the values that depend on no input."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from mpjax.casting.attention.axes import Dims, Unfit, fresh, upstream
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, live_equations, variables
from mpjax.program.evaluator import bind
from mpjax.program.primitives import primitive

# By name: a mark of devices, and a cast, are no operations on values.


class Inlined(Dataflow):
    """The dataflow of an open jaxpr without calls, its dead equations left out."""

    def __init__(self, jaxpr: Any, consts: Mapping[Any, Any] = MappingProxyType({})):
        super().__init__(live_equations(jaxpr), jaxpr.outvars)
        self.visited: set[int] = set()  # The equations that a search has looked at, by `id`.
        self.consts, self._values = consts, dict(consts)
        self._closed = set(consts)
        self._bits: set[Any] = set()  # What random bits determine, and no number that the program is given.
        floats = self._floats = {v for v in (*jaxpr.invars, *jaxpr.constvars) if compat.is_inexact(v.aval)}
        for eqn in self.eqns:
            read = set(variables(eqn.invars))
            apart = eqn.effects or primitive(eqn.primitive.name).foreign or _communicates(eqn)
            if read <= self._closed and not apart:
                self._closed.update(eqn.outvars)
            if not read.isdisjoint(floats):
                floats.update(eqn.outvars)
            elif not read.isdisjoint(self._bits) or "random" in eqn.primitive.name or "threefry" in eqn.primitive.name:
                self._bits.update(eqn.outvars)

    def maker(self, v: Any) -> Any:
        """As of any dataflow; notes that a search has looked at the equation."""
        eqn = super().maker(v)
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

    def reads_floats(self, v: Any) -> bool:
        """Whether a variable depends on a float input, for which it may have a derivative."""
        return not isinstance(v, compat.Literal) and v in self._floats

    def is_constant(self, v: Any) -> bool:
        """Whether a variable depends on no input."""
        return isinstance(v, compat.Literal) or v in self._closed

    def constant(self, v: Any, limit: int = 2**16) -> np.ndarray | None:
        """The value of a variable that depends on no input; None for any other, or if only the program can make it.

        Args:
            v: The variable.
            limit: The most elements that an array on the way to it may have; None beyond that.
        """
        if isinstance(v, compat.Literal):
            return np.asarray(v.val)
        if v not in self._closed or v.aval.size > limit:
            return None
        if any(x.aval.size > limit for eqn in self.makers(v) or () for x in eqn.outvars):
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
        return None if v not in self._closed else self.before([v])


def changes_dtype(eqn: Any) -> bool:
    """Whether an equation is a cast to another dtype."""
    return eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype


def _communicates(eqn: Any) -> bool:
    """Whether an equation has a meaning only inside its `shard_map`."""
    axes = (eqn.params.get("axis_name"), *(eqn.params.get("axes") or ()))
    return eqn.primitive.name != "pvary" and any(isinstance(axis, (str, tuple)) for axis in axes)
