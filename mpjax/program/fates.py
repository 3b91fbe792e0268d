"""Where the gradients of a program go: into an update, out of the program, or into values that it keeps.

A gradient in half may be inf or NaN, and is rounded. An update of a known optimizer can skip it; nothing else can.
Marks on the leaves of gradients, and on what updates receive, show how the ones reach the others.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from mpjax.program import compat
from mpjax.program.dataflow import once_per_jaxpr
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import Block, Site, lay_out, sub_jaxprs

# By name: JAX's `name` is an identity with a label, which marks arrays.

_GRADIENT, _UPDATE = "mpjax_gradient", "mpjax_update"


def mark_gradient(number: int, grads: Any) -> Any:
    """Marks the leaves of the gradient with this number in its program."""
    leaves, structure = jax.tree.flatten(grads)
    named = [checkpoint_name(x, f"{_GRADIENT} {number} {i}") for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, named)


def mark_update(grads: Any) -> Any:
    """Marks the gradients that an update receives."""
    return jax.tree.map(lambda x: checkpoint_name(x, _UPDATE), grads)


class _Fact(NamedTuple):
    """What a value depends on, without what has passed through an update. Sets are the bits of integers.

    Attributes:
        gradients: The leaves of gradients.
        kept: Those that were combined with an array of the same shape that the program was given, as in `p - lr * g`.
        inputs: The program's inputs.
    """

    gradients: int = 0
    kept: int = 0
    inputs: int = 0


def _join(a: _Fact, b: _Fact) -> _Fact:
    return _Fact(*map(operator.or_, a, b))


@dataclasses.dataclass(frozen=True)
class Fates:
    """The fates of a program's gradients.

    Args:
        leaves: The leaves of each gradient, by its number. Sets of leaves are the bits of integers.
        updated: The leaves that reach an update.
        kept: The leaves that change an output of their shape otherwise than through an update.
        outputs: For each output, the leaves that leave the program in it unchanged.
        receiving: The indices of the inputs that reach an update.
    """

    leaves: dict[int, int]
    updated: int
    kept: int
    outputs: Sequence[int]
    receiving: frozenset[int]

    def is_updated(self, number: int) -> bool:
        """Whether every leaf of a gradient reaches an update in the program, and changes nothing else."""
        leaves = self.leaves.get(number, 0)
        return bool(leaves) and not leaves & ~self.updated and not leaves & self.kept

    def handed_out(self, number: int) -> int:
        """The leaves of a gradient if it leaves the program, for an update that may be outside; 0 otherwise."""
        leaves, out = self.leaves.get(number, 0), functools.reduce(operator.or_, self.outputs, 0)
        return 0 if leaves & ~(out | self.updated) or leaves & self.kept else leaves


def fates(jaxpr: Any) -> Fates:
    """The fates of the gradients in a closed jaxpr."""
    block = lay_out(jaxpr)
    bits: dict[tuple[int, int], int] = {}  # The bit of each leaf of a gradient.
    shapes: list[tuple[int, ...]] = []
    received = _Fact()

    def of_gradient(eqn: Any, fact: _Fact) -> _Fact:
        number, leaf = map(int, eqn.params["name"].split()[1:])
        if (number, leaf) not in bits:
            bits[number, leaf] = 1 << len(shapes)
            shapes.append(eqn.outvars[0].aval.shape)
        return fact._replace(gradients=fact.gradients | bits[number, leaf], kept=0)

    def rule(site: Site, given: list[_Fact]) -> Sequence[_Fact]:
        nonlocal received
        label = _label(site.eqn)
        if label.startswith(_GRADIENT):
            return [of_gradient(site.eqn, given[0])]
        if label == _UPDATE:
            received = _join(received, given[0])
            return [_Fact(inputs=given[0].inputs)]
        if site.blocks and (not site.is_loop or _has_marks(site.eqn)):
            return site.results(given, inside, _join, iterations=len(given) + 1)
        return [_combined(site.eqn, v, given) for v in site.outvars]

    def inside(block: Block, ins: Sequence[_Fact]) -> list[_Fact]:
        env = dict.fromkeys((*block.jaxpr.constvars, *block.jaxpr.invars), _Fact())
        env.update(zip(block.jaxpr.invars, ins, strict=False))
        return evaluate(block, env, rule, constant=lambda literal, eqn: _Fact())

    outs = inside(block, [_Fact(inputs=1 << i) for i in range(len(block.jaxpr.invars))])
    kept = 0
    for v, fact in zip(block.outvars, outs, strict=True):
        ends = (i for i in _members(fact.kept) if shapes[i] and v.aval.shape[-len(shapes[i]) :] == shapes[i])
        kept |= sum(1 << i for i in ends)
    leaves: dict[int, int] = {}
    for (number, _), bit in bits.items():
        leaves[number] = leaves.get(number, 0) | bit
    unchanged = [fact.gradients & ~fact.kept for fact in outs]
    return Fates(leaves, received.gradients, kept, unchanged, frozenset(_members(received.inputs)))


def _combined(eqn: Any, out: Any, given: Sequence[_Fact]) -> _Fact:
    """The fact of a result of an operation."""
    joined = functools.reduce(_join, given, _Fact())
    if eqn.primitive.name == "broadcast_in_dim" and compat.numel(out.aval) > compat.numel(eqn.invars[0].aval):
        return joined._replace(inputs=0)  # A learning rate is no array that the script keeps.
    shape = getattr(out.aval, "shape", ())
    arrays = [
        fact
        for v, fact in zip(eqn.invars, given, strict=True)
        if getattr(v.aval, "shape", None) == shape and compat.is_inexact(v.aval)
    ]
    kept = joined.kept
    for gradient in arrays:
        if gradient.gradients and any(x.inputs and not x.gradients & gradient.gradients for x in arrays):
            kept |= gradient.gradients
    return joined._replace(kept=kept)


def _label(eqn: Any) -> str:
    return str(eqn.params["name"]) if eqn.primitive.name == "name" else ""


def _has_marks(eqn: Any) -> bool:
    return any(_marked(sub.opened) for sub in sub_jaxprs(eqn))


@once_per_jaxpr
def _marked(jaxpr: Any) -> bool:
    return any(_label(eqn).startswith((_GRADIENT, _UPDATE)) or _has_marks(eqn) for eqn in jaxpr.eqns)


def _members(bits: int) -> Iterator[int]:
    return (i for i in range(bits.bit_length()) if bits >> i & 1)


class Arrays:
    """Remembers something about arrays while they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def add(self, arrays: Iterable[Any], value: Any) -> None:
        """Remembers `value` about each array; what is no array of JAX is passed over."""
        for x in arrays:
            if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
                self._known[id(x)] = weakref.ref(x, functools.partial(self._forget, id(x))), value

    def _forget(self, key: int, reference: Any) -> None:
        if key in self._known and self._known[key][0] is reference:
            del self._known[key]

    def get(self, x: Any) -> Any:
        """What was remembered about an object; None if nothing was."""
        reference, value = self._known.get(id(x), (None, None))
        return value if reference is not None and reference() is x else None

    def __bool__(self) -> bool:
        return bool(self._known)
