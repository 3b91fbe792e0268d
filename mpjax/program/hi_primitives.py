"""JAX's upcoming implementations of higher-order primitives, read as the present ones.

JAX moves `checkpoint`, `custom_jvp`, `custom_vjp` and others to one primitive, `call_hi_primitive`, whose equation
holds an object with the rules. In a program that mpjax reads, such an equation is replaced by one of the present
primitive, so that everything that enters that one enters it too. (`compat.present_primitives` avoids most of them.)
"""

from __future__ import annotations

from typing import Any

from mpjax.program import compat
from mpjax.program.graph import replaced


def present(jaxpr: Any) -> Any:
    """A closed jaxpr in which JAX's own hi primitives are replaced at any depth; the same one if it has none."""
    old = compat.open_jaxpr(jaxpr).jaxpr
    new = present_open(old)
    return jaxpr if new is old else compat.closed_like(jaxpr, new)


def present_open(jaxpr: Any) -> Any:
    """The same of an open jaxpr."""
    return replaced(jaxpr, _present, {})


def _present(eqn: Any) -> Any:
    call = compat.present_call(eqn) if eqn.primitive.name == "call_hi_primitive" else None
    return eqn if call is None else compat.equation_of(call, eqn)
