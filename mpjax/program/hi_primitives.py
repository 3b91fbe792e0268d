"""JAX's upcoming implementations of higher-order primitives, read as the present ones.

JAX moves `checkpoint`, `custom_jvp`, `custom_vjp` and others to one primitive, `call_hi_primitive`, whose equation
holds an object with the rules. In a program that mpjax reads, such an equation is replaced by one of the present
primitive, so that everything that enters that one enters it too. (`compat.present_primitives` avoids most of them.)
"""

from __future__ import annotations

from typing import Any

from mpjax.program import compat
from mpjax.program.graph import sub_jaxprs


def present(jaxpr: Any) -> Any:
    """A closed jaxpr in which JAX's own hi primitives are replaced at any depth; the same one if it has none."""
    old = compat.open_jaxpr(jaxpr).jaxpr
    new = present_open(old)
    return jaxpr if new is old else compat.closed_like(jaxpr, new)


def present_open(jaxpr: Any) -> Any:
    """The same of an open jaxpr."""
    return _Replaced().open(jaxpr)


class _Replaced:
    """Sub-jaxprs that are shared stay shared."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def open(self, jaxpr: Any) -> Any:
        """An open jaxpr without such equations; the same one if it has none."""
        if id(jaxpr) not in self._known:
            eqns = [self._equation(eqn) for eqn in jaxpr.eqns]
            same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
            self._known[id(jaxpr)] = jaxpr, jaxpr if same else jaxpr.replace(eqns=eqns)
        return self._known[id(jaxpr)][1]

    def _equation(self, eqn: Any) -> Any:
        call = compat.present_call(eqn) if eqn.primitive.name == "call_hi_primitive" else None
        if call is not None:
            eqn = compat.equation_of(call, eqn)
        for inner in sub_jaxprs(eqn):
            old = compat.open_jaxpr(inner.jaxpr).jaxpr
            if (new := self.open(old)) is not old:
                eqn = compat.with_sub_jaxpr(eqn, old, new)
        return eqn
