"""A program with its inner calls inlined: its values, resolved through calls and into the bodies of loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mpjax.program import compat
from mpjax.program.dataflow import Dataflow
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import NOBODY, Owners, Site, site_of, sub_jaxprs
from mpjax.program.primitives import primitive

_T = TypeVar("_T")
INPUT, CONSTANT, COMPUTED = "input", "constant", "computed"


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One array of a program, compared by identity.

    Args:
        aval: Its shape and dtype.
        kind: `INPUT` of the whole program, `CONSTANT`, or `COMPUTED` by an equation.
        constant: The array or number of a constant.
        whole: The global value over all devices, if this is one device's part of it.
    """

    aval: Any
    kind: str = COMPUTED
    constant: Any = None
    whole: Value | None = None

    @property
    def bytes(self) -> int:
        """Its size in memory; 0 if it is not an array."""
        return self.aval.size * self.aval.dtype.itemsize if compat.is_shaped(self.aval) else 0


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """An equation, the values it reads and writes, and its sub-jaxprs (loop bodies, branches, kernels)."""

    site: Site
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    inner: tuple[Flow, ...] = ()

    @property
    def invars(self) -> tuple[Value, ...]:
        """The values that it reads."""
        return self.reads

    @property
    def outvars(self) -> tuple[Value, ...]:
        """The values that it writes."""
        return self.writes

    @property
    def inside(self) -> Iterator[Node]:
        """The nodes of its sub-jaxprs, at any depth."""
        return (node for inner in self.inner for node in inner.eqns)

    def results(
        self, given: Sequence[_T], run: Callable[[Flow, Sequence[_T]], list[_T]], join: Callable[[_T, _T], _T]
    ) -> list[_T]:
        """The facts of what it writes: see `Site.results`."""
        return self.site.results(given, run, join, self.inner)


class Flow(Dataflow):
    """A program with its inner calls inlined; its equations are the nodes of all levels, in program order.

    Args:
        inputs: The inputs. In a loop body, loop-invariant inputs are the outer values themselves.
        nodes: The equations of this level.
        outputs: The outputs.
        split: How a sub-jaxpr reads the operands of its equation: see `SubJaxpr.split`.
    """

    def __init__(self, inputs: Sequence[Value], nodes: Sequence[Node], outputs: Sequence[Value], split: Any = None):
        super().__init__((each for node in nodes for each in (node, *node.inside)), outputs)
        self.inputs, self.nodes, self.outputs, self.split = tuple(inputs), nodes, tuple(outputs), split


def flow_of(jaxpr: Any, owners: Owners = NOBODY) -> Flow:
    """The graph of a closed jaxpr; `owners` as in `owners_of`."""
    inputs = [Value(v.aval, INPUT) for v in compat.open_jaxpr(jaxpr).jaxpr.invars]
    return _flow(jaxpr, inputs, None, owners=owners)


def _flow(jaxpr: Any, inputs: Sequence[Value], around: Site | None, owners: Owners = NOBODY, split: Any = None) -> Flow:
    opened, consts = compat.open_jaxpr(jaxpr)
    values = dict(zip(opened.invars, inputs, strict=True))
    # The constants of an open jaxpr are unknown here, but no equation produces them.
    known = list(consts) or [None] * len(opened.constvars)
    values |= {v: Value(v.aval, CONSTANT, c) for v, c in zip(opened.constvars, known, strict=True)}

    nodes: list[Node] = []

    def rule(eqn: Any, reads: Sequence[Value]) -> Sequence[Value]:
        site = site_of(eqn, around, owners)
        row = primitive(site.name)
        if row.call or row.shards:
            (inner,) = sub_jaxprs(eqn)
            called = _flow(inner.jaxpr, _arguments(inner.opened, reads), site)
            nodes.extend(called.nodes)
            return called.outputs
        writes = tuple(Value(v.aval) for v in eqn.outvars)
        nodes.append(Node(site, tuple(reads), writes, tuple(_bodies(eqn, reads, site))))
        return writes

    outputs = evaluate(opened, values, rule, constant=lambda v, eqn: Value(v.aval, CONSTANT, v.val))
    return Flow(inputs, nodes, outputs, split)


def _arguments(jaxpr: Any, reads: Sequence[Value]) -> list[Value]:
    """The values as inputs of an inner function: in a `shard_map`, one device's part of each."""
    shapes = [v.aval for v in jaxpr.invars]
    return [
        read
        if getattr(aval, "shape", None) == getattr(read.aval, "shape", None)
        else Value(aval, read.kind, whole=read)
        for read, aval in zip(reads, shapes, strict=True)
    ]


def _bodies(eqn: Any, reads: Sequence[Value], site: Site) -> Iterator[Flow]:
    """The sub-jaxprs of a loop, a conditional or a kernel. Inputs that change between iterations are new values."""
    for inner in sub_jaxprs(eqn):
        same = [i if n < inner.consts else None for n, i in enumerate(inner.operands)]
        inputs = [Value(v.aval) if i is None else reads[i] for i, v in zip(same, inner.opened.invars, strict=True)]
        yield _flow(inner.jaxpr, inputs, site, split=inner.split)
