"""A traced step, and what its arguments are: parameters, optimizer state or inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from mpjax.casting.setting import Trial
from mpjax.program.inlining import flow_of
from mpjax.program.objects import contains_state
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import BACKWARD, FORWARD
from mpjax.program.tracing import TracedCall, is_array

PARAMETERS, STATE, INPUTS, MASTERS = "parameters", "optimizer state", "inputs", "master weights"


@dataclasses.dataclass
class Traced:
    """A traced step.

    Args:
        program: Its program.
        kinds: The kind of each of its arguments.
        carried: For arguments that it returns updated, the number of the result.
        donated: The arguments that it may overwrite.
        trial: What was tried, and what was found.
        whole: Whether autocast is around the whole step, not around what it differentiates.
        is_loss: Whether it is the gradient of a loss that was given.
    """

    program: TracedCall
    kinds: list[str]
    carried: dict[int, int]
    donated: tuple[int, ...]
    trial: Trial
    is_loss: bool
    whole: bool = False


def carried_by(program: TracedCall, args: Any, kwargs: Any) -> dict[int, int]:
    """The arguments that a step returns updated, each with the number of the result.

    An argument and a result belong together if they are trees of the same structure, shapes and dtypes, unless the
    result is a gradient: all of it leaves the backward pass. The state of NNX objects is returned by the pure form of
    the call, array by array.
    """
    flow = flow_of(program.jaxpr)
    avals = [value.aval for value in flow.outputs]
    makers = [flow.maker(value) for value in flow.outputs]
    gradients = {i for i, node in enumerate(makers) if node is not None and node.site.phase == BACKWARD}
    if contains_state((args, kwargs)):
        left = [(i, (aval.shape, aval.dtype)) for i, aval in enumerate(avals) if i not in gradients]
        return dict(_in_order([(x.shape, x.dtype) for x in program.arrays], left))
    out = program.rebuild([_Slot(i, aval.shape, aval.dtype) for i, aval in enumerate(avals)])
    numbers = iter(range(len(program.arrays)))
    slots = jax.tree.map(lambda x: _Slot(next(numbers), x.shape, x.dtype) if is_array(x) else x, (args, kwargs))
    trees = list(out) if isinstance(out, (tuple, list)) and not hasattr(out, "_fields") else [out]
    found: dict[int, int] = {}
    for given in (*slots[0], *slots[1].values()):
        match = next((x for x in trees if _signature(x) == _signature(given) and jax.tree.leaves(x)), None)
        if match is not None:
            trees.remove(match)
            pairs = zip(jax.tree.leaves(given), jax.tree.leaves(match), strict=True)
            numbered = {a.number: b.number for a, b in pairs if isinstance(a, _Slot) and isinstance(b, _Slot)}
            found |= {} if gradients.issuperset(numbered.values()) else numbered
    return found


def _in_order(given: Sequence[Any], left: list[tuple[int, Any]]) -> Iterator[tuple[int, int]]:
    """Pairs each array with the first result of its type that is left."""
    for i, kind in enumerate(given):
        match = next((each for each in left if each[1] == kind), None)
        if match is not None:
            left.remove(match)
            yield i, match[0]


class _Slot:
    """The place of an array in a tree."""

    def __init__(self, number: int, shape: Any, dtype: Any):
        self.number, self.type = number, (tuple(shape), dtype)


def _signature(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf.type if isinstance(leaf, _Slot) else type(leaf) for leaf in leaves]


def kinds_of(program: TracedCall, carried: Mapping[int, int]) -> list[str]:
    """The kind of each argument: parameters, optimizer state or inputs.

    What a step returns updated is a parameter if the differentiated function reads it, and else optimizer state. A
    function that returns nothing updated has its parameters in its first argument.
    """
    flow = flow_of(program.jaxpr)
    origin = {value: i for i, value in enumerate(flow.inputs)}
    read: set[int] = set()
    for node in flow.nodes:
        if node.site.phase != FORWARD or "jvp(" in node.site.module:
            read |= {origin[value] for value in node.reads if value in origin}
        row = primitive(node.site.name)
        if node.reads and node.reads[0] in origin and (row.op is Op.CONVERT or row.moves):
            origin |= dict.fromkeys(node.writes, origin[node.reads[0]])

    def kind(i: int) -> str:
        if carried:
            return INPUTS if i not in carried else PARAMETERS if i in read else STATE
        is_float = jax.numpy.issubdtype(program.arrays[i].dtype, jax.numpy.inexact)
        return PARAMETERS if program.names[i].startswith("[0][0]") and is_float else INPUTS

    return [kind(i) for i in range(len(program.arrays))]
