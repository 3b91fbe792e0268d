"""The values of a gradient program that count as activations, and those that count as gradients.

Only some intermediates count: operands and results of matmuls and convolutions (read and written by Tensor Cores), and
module outputs (values read by an equation outside the module's named scope). Casts, transposes and similar operations
only pass a value on. The equation that computed the value represents it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.program.dtypes import is_half, is_low
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import Block, Site
from mpjax.program.primitives import MATMULS, primitive
from mpjax.program.source import BACKWARD, FORWARD

# By name: mpjax's own primitives of scaled formats, and JAX's sum of gradients.

COPIES = PACKED, _ = "packed_elements", "float8_quantise"  # primitives that make copies in eight bits
_NOTHING: frozenset[int] = frozenset()


class _Producers(NamedTuple):
    """The equations that produced a value. `near` sees through moves and casts, `far` through scalings and sums too."""

    near: frozenset[int] = _NOTHING
    far: frozenset[int] = _NOTHING

    def or_(self, other: _Producers) -> _Producers:
        return _Producers(self.near | other.near, self.far | other.far)


@dataclasses.dataclass(frozen=True)
class Counted:
    """The numbers of the equations whose results count.

    Args:
        activations: Equations of the forward pass.
        gradients: Equations of the backward pass that compute gradients of activations.
        parameters: Equations of the backward pass, matmuls and sums, that compute gradients of parameters.
        half: The half dtype in which the program stores an equation's results, or in which an operation reads them, by
            its number; empty for a program without half.
    """

    activations: frozenset[int]
    gradients: frozenset[int]
    parameters: frozenset[int]
    half: Mapping[int, np.dtype]

    @functools.cached_property
    def all(self) -> frozenset[int]:
        """Activations and gradients of both kinds."""
        return self.activations | self.gradients | self.parameters

    def matters(self, number: int) -> bool:
        """Whether half's limits apply to an equation's result; in a program without half they apply to every result."""
        return not self.half or number in self.half


def counted(block: Block, num_gradients: int) -> Counted:
    """The equations that count in a program whose first outputs are gradients of parameters."""
    analysis = _Analysis(block, num_gradients)
    parameters = analysis.parameters
    phases = {number: analysis.places[number].phase for number in analysis.found}
    forward, backward = (frozenset(n for n in phases if phases[n] == phase) for phase in (FORWARD, BACKWARD))
    return Counted(forward, backward - parameters, backward & parameters, analysis.half)


def in_units_of_scales(eqn: Any) -> bool:
    """Whether an equation's result is a copy in eight bits, its scale, or a matmul of copies without their scales."""
    if eqn.primitive.name in MATMULS:
        return any(is_low(v) and not is_half(v) for v in eqn.invars)
    return eqn.primitive.name in ("float8_scale", *COPIES)


def equations_of_gradients(block: Block, num_gradients: int) -> frozenset[int]:
    """The equations that compute the gradients of parameters, looking through moves, casts, scalings and sums."""
    return _Analysis(block, num_gradients).parameters


class _Analysis:
    """Evaluates a program with `_Producers` in place of values, and finds the equations whose results count."""

    def __init__(self, block: Block, num_gradients: int):
        self.places = {place.number: place for place in block.places()}
        self.found, self.half = set[int](), dict[int, np.dtype]()
        outs = self.block(block, [_Producers()] * len(block.jaxpr.invars))
        self.parameters = frozenset[int]().union(*(producers.far for producers in outs[:num_gradients]))

    def block(self, block: Block, ins: Sequence[_Producers]) -> list[_Producers]:
        env = block.environment(ins, [_Producers()] * len(block.jaxpr.constvars))
        return evaluate(block, env, self._rule, lambda literal, place: _Producers())

    def _rule(self, place: Site, given: Sequence[_Producers]) -> list[_Producers]:
        return place.results(given, self.block, _Producers.or_) if place.blocks else self._computed(place, given)

    def _computed(self, place: Site, given: Sequence[_Producers]) -> list[_Producers]:
        eqn, name = place.eqn, place.name
        near, far = functools.reduce(_Producers.or_, given, _Producers())
        if name in (*COPIES, "restored"):  # A copy stands for its array.
            return [given[0]]
        if primitive(name).moves or primitive(name).whole:
            self._note_half(place, near)
            return [given[min(i, len(given) - 1)] if given else _Producers() for i in range(len(eqn.outvars))]
        if name in MATMULS or primitive(name).contracts:
            self.found |= near
        if (name in (*MATMULS, "float8_rescale") or primitive(name).contracts) and not in_units_of_scales(eqn):
            self.found.add(place.number)
        self._mark_module_outputs(place, near)
        own = frozenset({place.number})
        self._note_half(place, own)
        sees_through = name == "add_any" or (primitive(name).scales and any(not v.aval.shape for v in eqn.invars))
        return [_Producers(own, own | far if sees_through else own)] * len(eqn.outvars)

    def _note_half(self, place: Site, numbers: Iterable[int]) -> None:
        """Notes that the values of some equations are stored in half, if an equation has half results."""
        half = next((v.aval.dtype for v in place.eqn.outvars if is_half(v)), None)
        if half is not None:
            self.half |= dict.fromkeys(numbers, half)

    def _mark_module_outputs(self, reader: Site, numbers: Iterable[int]) -> None:
        """Marks the operands that leave their module: the reader lies outside of it."""
        for number in numbers:
            path = self.places[number].path
            if path and reader.path != path and not reader.path.startswith(path + "/"):
                self.found.add(number)
