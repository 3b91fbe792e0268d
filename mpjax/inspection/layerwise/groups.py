"""The modules of a program as groups of equations, and the values that they pass to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpjax._jaxpr import compat
from mpjax._jaxpr.evaluator import evaluate
from mpjax._jaxpr.primitives import primitive
from mpjax._jaxpr.program import Block, Site
from mpjax._jaxpr.source import informative_frame
from mpjax.policy import HALF_DTYPES


@dataclasses.dataclass(frozen=True)
class Group:
    """The equations of one module, or of one user function where no module has a name.

    Args:
        name: The module path, or the function as `loss_fn (train.py)`.
        path: The module path; empty for a function.
    """

    name: str
    path: str


@dataclasses.dataclass(frozen=True)
class Grouped:
    """The groups of a program.

    Args:
        groups: The group of each equation, by its number.
        passed_on: The results, as (number, index), that an equation of another group reads or that the program returns.
    """

    groups: dict[int, Group]
    passed_on: frozenset[tuple[int, int]]


def grouped(block: Block) -> Grouped:
    """The groups of a program, and their results that other groups read or that the program returns."""
    groups = dict(_groups(block, None))
    passed_on: set[tuple[int, int]] = set()
    outs = _Readers(groups, passed_on).block(block, [None] * len(block.jaxpr.invars))
    passed_on.update(producers for producers in outs if producers is not None)
    return Grouped(groups, frozenset(passed_on))


def is_transparent(place: Site) -> bool:
    """Whether an equation runs its sub-jaxpr once, in place: `jit`, `remat`, custom derivative rules."""
    return bool(place.blocks) and primitive(place.name).call


def passes_through(place: Site) -> bool:
    """Whether an equation only moves elements or casts without rounding, so the operand's producer is the source."""
    eqn, row = place.eqn, primitive(place.name)
    if place.blocks or not (row.moves or row.whole) or len(eqn.outvars) != 1:
        return False
    given, result = (getattr(v.aval, "dtype", None) for v in (eqn.invars[0], eqn.outvars[0]))
    return given == result or (given in HALF_DTYPES and result == np.float32)


def _groups(block: Block, outer: Group | None) -> Iterator[tuple[int, Group]]:
    for place in block.eqns:
        path = place.path
        inherited = outer is not None and (not path or path == outer.path)
        group = outer if inherited and outer is not None else Group(path or _function(place), path)
        yield place.number, group
        for inner in place.blocks:
            # JAX caches the traces of its own jitted functions, with the source lines of their first call.
            yield from _groups(inner, group if place.name in ("jit", "pjit") else None)


def _function(place: Site) -> str:
    """The innermost function of a traceback that is not in a layer library, as `loss_fn (train.py)`."""
    frames = compat.user_frames(place.eqn)
    which = informative_frame([frame.file_name for frame in frames], in_layer=False)
    if which is None:
        return ""
    return f"{frames[which].function_name.rpartition('.')[2]} ({frames[which].file_name.rsplit('/', 1)[-1]})"


class _Readers:
    """Finds the values passed between groups. A value is identified by its equation's number and its result index."""

    def __init__(self, groups: dict[int, Group], passed_on: set[tuple[int, int]]):
        self.groups, self.passed_on = groups, passed_on

    def block(self, block: Block, ins: Sequence[Any]) -> list[Any]:
        env = block.environment(ins, [None] * len(block.jaxpr.constvars))
        return evaluate(block, env, self._rule, lambda literal, place: None)

    def _rule(self, place: Site, producers: Sequence[Any]) -> Sequence[Any]:
        if is_transparent(place):
            return self.block(place.blocks[0], producers)
        if passes_through(place) and producers[0] is not None:
            return producers[:1]
        inside, outvars = bool(place.blocks), place.eqn.outvars
        for producer in producers:
            if producer is not None and (inside or self.groups[producer[0]] != self.groups[place.number]):
                self.passed_on.add(producer)
        for body in place.blocks:
            outs = self.block(body, [None] * len(body.jaxpr.invars))
            self.passed_on.update(producer for producer in outs if producer is not None)
        return [None if inside else (place.number, i) for i in range(len(outvars))]
