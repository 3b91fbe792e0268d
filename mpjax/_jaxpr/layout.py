"""Lays out a jaxpr: numbers its equations and those of its sub-jaxprs, with their context."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.primitives import primitive
from mpjax._jaxpr.walk import Site, inner_jaxprs, programs_in, site_of


@dataclasses.dataclass(frozen=True)
class Place:
    """One equation and its position in the program.

    Args:
        number: Its unique number, in program order.
        site: The equation, its module and its source line.
        loops: The numbers of the enclosing loops, outermost first.
        blocks: Its sub-jaxprs, if they are entered.
        end: The number of the next equation outside it.
        axes: The mesh axes of the enclosing `shard_map`, with their sizes.
    """

    number: int
    site: Site
    loops: tuple[int, ...]
    blocks: tuple[Block, ...]
    end: int
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop, which runs its sub-jaxprs repeatedly."""
        return primitive(self.site.name).loop

    def places(self) -> Iterator[Place]:
        """Yields this equation and every equation inside it."""
        yield self
        for block in self.blocks:
            yield from block.places()


@dataclasses.dataclass(frozen=True)
class Block:
    """A jaxpr, its constants, and the places of its equations."""

    jaxpr: Any
    consts: Sequence[Any]
    rows: tuple[Place, ...]
    start: int
    end: int

    @functools.cached_property
    def last_uses(self) -> list[list[Any]]:
        """For each equation, the variables that no later equation reads and the block does not return."""
        seen = {v for v in self.jaxpr.outvars if not isinstance(v, compat.Literal)}
        dead: list[list[Any]] = []
        for place in reversed(self.rows):
            eqn = place.site.eqn
            used = {v for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, compat.Literal)}
            dead.append([v for v in used if v not in seen])
            seen |= used
        return dead[::-1]

    def places(self) -> Iterator[Place]:
        """Yields every equation, including nested ones, in program order."""
        for place in self.rows:
            yield from place.places()


def lay_out(
    jaxpr: Any,
    start: int = 0,
    outer: Site | None = None,
    loops: tuple[int, ...] = (),
    axes: tuple[tuple[str, int], ...] = (),
    owners: Mapping[int, str] | None = None,
) -> Block:
    """Numbers the equations of a jaxpr and of its sub-jaxprs; `owners` as in `instances.py`."""
    opened = compat.open_jaxpr(jaxpr)
    rows, number = [], start
    for eqn in opened.jaxpr.eqns:
        site = site_of(eqn, outer, owners or {})
        around = (*loops, number) if primitive(site.name).loop else loops
        blocks, end = [], number + 1
        for inner in _entered(eqn):
            devices = tuple(manual_axes(eqn.params).items()) if site.name == "shard_map" else axes
            blocks.append(lay_out(inner, end, site, around, devices))
            end = blocks[-1].end
        rows.append(Place(number, site, loops, tuple(blocks), end, axes))
        number = end
    return Block(opened.jaxpr, opened.consts, tuple(rows), start, number)


def manual_axes(params: dict[str, Any]) -> dict[str, int]:
    """The mesh axes that a `shard_map` maps over, with their sizes."""
    options = compat.shard_map_options(params)
    return {axis: options["mesh"].shape[axis] for axis in options["mesh"].axis_names if axis in options["axis_names"]}


def _entered(eqn: Any) -> Sequence[Any]:
    """The sub-jaxprs of an equation that the interpreter evaluates."""
    name, params = eqn.primitive.name, eqn.params
    if primitive(name).call or name == "shard_map":
        return inner_jaxprs(eqn)[:1]
    if name == "scan":
        return (params["jaxpr"],)
    if name == "while":
        return (params["cond_jaxpr"], params["body_jaxpr"])
    return params["branches"] if name == "cond" else ()


def unseen(block: Block) -> tuple[str, ...]:
    """The operations, with their lines, whose code is not evaluated operation by operation: kernels, callbacks."""
    outer = (place.site for place in block.places() if not place.blocks)
    return tuple(dict.fromkeys(s.place for s in outer if primitive(s.name).foreign or programs_in(s.eqn)))
