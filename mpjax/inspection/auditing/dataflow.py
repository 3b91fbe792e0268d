"""The dataflow graph of a program, with inner calls inlined: the equation that produces each value, and its uses.

It shows the residuals, values that forward equations compute and backward equations read; and the static bounds of
constants, positions, masks, and arithmetic on them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.program import compat
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import NOBODY, Owners, Site, site_of, sub_jaxprs
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import FORWARD

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


@dataclasses.dataclass(eq=False, slots=True)
class Flow:
    """A program with its inner calls inlined.

    Args:
        inputs: The inputs. In a loop body, loop-invariant inputs are the outer values themselves.
        nodes: The equations, in the program's order.
        outputs: The outputs.
    """

    inputs: tuple[Value, ...]
    nodes: list[Node]
    outputs: tuple[Value, ...]

    def all_nodes(self) -> Iterator[Node]:
        """The nodes of all levels."""
        for node in self.nodes:
            yield node
            for inner in node.inner:
                yield from inner.all_nodes()


def flow_of(jaxpr: Any, owners: Owners = NOBODY) -> Flow:
    """The graph of a closed jaxpr; `owners` as in `mpjax/program/graph.py`."""
    inputs = [Value(v.aval, INPUT) for v in compat.open_jaxpr(jaxpr).jaxpr.invars]
    return _flow(jaxpr, inputs, None, owners=owners)


def _flow(jaxpr: Any, inputs: Sequence[Value], around: Site | None, owners: Owners = NOBODY) -> Flow:
    opened, consts = compat.open_jaxpr(jaxpr)
    values = dict(zip(opened.invars, inputs, strict=True))
    # The constants of an open jaxpr are unknown here, but no equation produces them.
    known = list(consts) or [None] * len(opened.constvars)
    values |= {v: Value(v.aval, CONSTANT, c) for v, c in zip(opened.constvars, known, strict=True)}

    nodes: list[Node] = []

    def rule(eqn: Any, reads: Sequence[Value]) -> Sequence[Value]:
        site = site_of(eqn, around, owners)
        if primitive(site.name).call or site.name == "shard_map":
            (inner,) = sub_jaxprs(eqn)
            called = _flow(inner.jaxpr, _arguments(inner.opened, reads), site)
            nodes.extend(called.nodes)
            return called.outputs
        writes = tuple(Value(v.aval) for v in eqn.outvars)
        nodes.append(Node(site, tuple(reads), writes, tuple(_bodies(eqn, reads, site))))
        return writes

    outputs = evaluate(opened, values, rule, constant=lambda v, eqn: Value(v.aval, CONSTANT, v.val))
    return Flow(tuple(inputs), nodes, tuple(outputs))


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
        yield _flow(inner.jaxpr, inputs, site)


def residuals_of(flow: Flow) -> Iterator[Value]:
    """The values that a program with a gradient keeps from its forward pass for its backward pass.

    Each value counts once, however often it is read. The program's inputs and constants do not count: they are kept
    anyway. Arrays filled with one constant do not count either: XLA creates them where they are read. A half copy of a
    weight counts. Residuals within a loop's body count once, as each iteration frees them.
    """
    forward: set[Value] = set()
    filled: set[Value] = set()
    kept: dict[Value, None] = {}
    for node in flow.nodes:
        row = primitive(node.site.name)
        if node.site.phase != FORWARD:
            reads = node.reads[:1] if row.identity else node.reads
            kept |= dict.fromkeys(value for value in map(_whole, reads) if value in forward)
            continue
        fills = row.whole or row.op is Op.CONVERT
        if fills and all(value.constant is not None or value in filled for value in node.reads):
            filled.update(node.writes)
        else:
            forward.update(node.writes)
        for inner in node.inner:
            yield from residuals_of(inner)
    yield from kept


def _whole(value: Value) -> Value:
    return value if value.whole is None else _whole(value.whole)


@dataclasses.dataclass(frozen=True)
class Known:
    """Bounds of a value's elements.

    Args:
        low, high: The lower and upper bound.
        ids: Whether the elements are integer identifiers: positions, ids, labels.
    """

    low: float
    high: float
    ids: bool = False

    @property
    def constant(self) -> bool:
        """Whether all elements are the same number."""
        return self.low == self.high

    @property
    def largest(self) -> float:
        """The greatest magnitude."""
        return max(abs(self.low), abs(self.high))


_TRUTHS = Known(0, 1)
_LARGEST = 2**22


def known_values(flow: Flow) -> dict[Value, Known]:
    """The known bounds of each value of a program, including its sub-jaxprs."""
    known: dict[Value, Known] = {}

    def of(value: Value) -> Known | None:
        if value in known or value.constant is not None:
            return known.get(value) or _constant(value)
        return _TRUTHS if compat.is_shaped(value.aval) and value.aval.dtype == np.bool_ else None

    for node in flow.all_nodes():
        if len(node.writes) == 1 and (found := _result(node, [of(value) for value in node.reads])):
            known[node.writes[0]] = found
    return known


def _constant(value: Value) -> Known | None:
    array = value.constant
    if isinstance(array, jax.core.Tracer) or not getattr(array, "is_fully_addressable", True):
        return None
    # Closed-over weights are too large to scan, and their bounds are of no use.
    if not compat.is_shaped(value.aval) or not 0 < value.aval.size <= _LARGEST:
        return None
    if not (jnp.issubdtype(value.aval.dtype, jnp.number) or value.aval.dtype == bool):
        return None
    array = np.asarray(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return None
    low, high = float(array.min()), float(array.max())
    return None if math.isnan(low) else Known(low, high)


def _result(node: Node, operands: Sequence[Known | None]) -> Known | None:
    name, params, row = node.site.name, node.site.eqn.params, primitive(node.site.name)
    if name == "iota":
        return Known(0, params["shape"][params["dimension"]] - 1, ids=True)
    if name in _ARITHMETIC:
        return None if None in operands else _arithmetic(_ARITHMETIC[name], [x for x in operands if x])
    return _union([operands[i] for i in row.sources(len(operands))]) if row.keeps_values else None


def _union(operands: Sequence[Known | None]) -> Known | None:
    found = [operand for operand in operands if operand]
    if len(found) < len(operands):
        return None
    return Known(min(k.low for k in found), max(k.high for k in found), _ids(found))


def _ids(operands: Sequence[Known | None]) -> bool:
    return any(operand.ids for operand in operands if operand)


_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": max,
    "min": min,
    "neg": lambda a: -a,
}


def _arithmetic(operation: Callable[..., float], operands: Sequence[Known]) -> Known | None:
    """Interval arithmetic: these operations take their extremes at the corners."""
    if not all(math.isfinite(operand.largest) for operand in operands):
        return None
    corners = [operation(*corner) for corner in itertools.product(*((k.low, k.high) for k in operands))]
    # A position times 0.5 is a fraction, not an id.
    whole = all(operand.ids or float(operand.low).is_integer() for operand in operands)
    return Known(min(corners), max(corners), whole and _ids(operands))
