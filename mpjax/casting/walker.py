"""A walk over all equations of a program, loops and branches and functions inside included.

Planning reports (`explain`) and audits share it, so that both count the same FLOPs and name the same places.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from mpjax.casting import versions
from mpjax.casting.classify import MARK, join
from mpjax.casting.oplists import ALLOW


@dataclasses.dataclass(frozen=True)
class Site:
    """One equation and where it stands.

    Args:
        eqn: the equation.
        times: how often it runs (the lengths of the scans around it; a `while` counts as one turn).
        module: the named scopes around it, through all levels; Flax names modules this way.
        inside: the names of the primitives that it is inside of, outermost first.
        caller: the line of the equation around it.
    """

    eqn: Any
    times: int
    module: str
    inside: tuple[str, ...]
    caller: str = ""

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The user's line, as `file.py:12`; of what a library made, the line that called it."""
        return versions.source_line(self.eqn) or self.caller

    @property
    def flops(self) -> int:
        """FLOPs of a matmul or convolution, all its turns together; 0 for anything else."""
        return self.times * matmul_flops(self.eqn)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The programs inside an equation."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if versions.is_jaxpr(part):
                found.append(part)
    return found


def walk(
    jaxpr: Any, times: int = 1, module: str = "", inside: tuple[str, ...] = (), caller: str = ""
) -> Iterator[Site]:
    """Every equation of a jaxpr, open or closed, and of those inside it, in the program's order."""
    for eqn in versions.open_jaxpr(jaxpr).jaxpr.eqns:
        site = Site(eqn, times, join(module, module_of(eqn)), inside, caller)
        yield site
        for inner in inner_jaxprs(eqn):
            yield from walk(inner, turns(eqn, times), site.module, (*inside, site.name), site.source)


def turns(eqn: Any, times: int) -> int:
    """How often what is inside an equation runs, if the equation runs so often."""
    return times * eqn.params["length"] if eqn.primitive.name == "scan" else times


def module_of(eqn: Any) -> str:
    """The module path of an equation, without mpjax's own marks."""
    scopes = versions.scopes(eqn)
    if MARK not in scopes:
        return scopes
    return join(*(part for part in scopes.split("/") if MARK not in part))


def matmul_flops(eqn: Any) -> int:
    """FLOPs of one matmul or convolution, a multiply and an add counting two; 0 for anything else."""
    name = eqn.primitive.name
    if name not in ALLOW:
        return 0
    lhs, rhs = (v.aval for v in eqn.invars[:2])
    out = math.prod(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(lhs.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        features = rhs.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * out * math.prod(rhs.shape) // max(features, 1)
    # A ragged dot multiplies each row with the matrix of its group.
    return 2 * math.prod(lhs.shape) * rhs.shape[-1]
