"""Where an inf or NaN was made: an address that goes with each value through a program.

An address is a small vector of integers: a rank and the number of an equation, and for an equation inside loops the
turn of each loop followed by the number of what stands in it. Vectors compare as the program runs, turn by turn, so of
two addresses of one rank the smaller is the one that was made first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.casting import versions
from mpjax.inspection.probing import Block, Key, Place, Probe, Value, is_inexact

# Ranks, in the order in which they are reported. What is given or written as inf or NaN is idle as long as it is
# only moved about, and used from the first arithmetic on; once it makes a NaN, it is a fault.
BAD_ARGUMENT, MADE, USED_ARGUMENT, USED_CONSTANT, IDLE_ARGUMENT, IDLE_CONSTANT = range(6)
_SHIFT = 24
_NONE = np.iinfo(np.int32).max
_SINK = "sink"

# The elements of the result are those of the operand, all of them.
_SAME = frozenset(
    """reshape transpose squeeze rev broadcast_in_dim expand_dims copy copy_p name sharding_constraint device_put pvary
    optimization_barrier""".split()
)
# The elements of the result are some of the operands' elements.
_MOVES = _SAME | frozenset(
    """slice dynamic_slice gather concatenate stack unstack split select_n convert_element_type pad max min clamp
    reduce_max reduce_min cummax cummin dynamic_update_slice scatter scatter_max scatter_min sort top_k tile
    reduce_window_max reduce_window_min all_gather all_to_all ppermute pmax pmin reduce_precision""".split()
)
# How the results of comparisons with inf and NaN become the one boolean of a check.
_CHECKS = frozenset("is_finite and or not reshape squeeze broadcast_in_dim concatenate transpose stack".split())
_CHECKED = frozenset({"reduce_and", "reduce_or"})


@dataclasses.dataclass(frozen=True)
class Finding:
    """A decoded address.

    Args:
        number: the equation's.
        turn: for each loop around it, how many turns came before.
        iteration: the same as indices of what the loops go over (a reverse scan begins at its end).
        argument: the index of the leaf, if it was given.
        constant: whether the equation only reads an infinite constant of the program.
    """

    number: int
    turn: tuple[int, ...] = ()
    iteration: tuple[int, ...] = ()
    argument: int | None = None
    constant: bool = False


def decode(address: np.ndarray, places: dict[int, Place]) -> Finding | None:
    """What an address says; None if it is that of nothing."""
    if address[0] == _NONE:
        return None
    rank, number = int(address[0]) >> _SHIFT, int(address[0]) & ((1 << _SHIFT) - 1)
    if rank in (BAD_ARGUMENT, USED_ARGUMENT, IDLE_ARGUMENT):
        return Finding(number, argument=number)
    turn, iteration, rest = [], [], [int(n) for n in address[1:]]
    while places[number].site.name in ("scan", "while") and places[number].blocks:
        params = places[number].site.eqn.params
        turn.append(rest[0])
        iteration.append(params["length"] - 1 - rest[0] if params.get("reverse") else rest[0])
        number, rest = rest[1], rest[2:]
    return Finding(number, tuple(turn), tuple(iteration), constant=rank in (USED_CONSTANT, IDLE_CONSTANT))


class OriginProbe(Probe):
    """Carries addresses through a program.

    Args:
        block: the program; the depth of its loops decides how long an address is.
    """

    def __init__(self, block: Block):
        self.length = 1 + 2 * max((len(place.loops) for place in block.places()), default=0)

    def argument(self, index: int, array: Any) -> Any:
        """The shadow of the array that the program was given."""
        return self._unless_finite(array, self._address(IDLE_ARGUMENT, (), (), index))

    def result(self, outs: Sequence[Value], notes: dict[Key, Any]) -> Any:
        """The address of the first fault among the program's results and checks."""
        found = notes.get(_SINK, self.full(None))
        for array, shadow in outs:
            if shadow is None or not is_inexact(array):
                continue
            last = USED_CONSTANT if jnp.ndim(array) == 0 else MADE
            counts = shadow[0] < (last + 1) << _SHIFT
            found = self.join(found, jnp.where(counts, shadow, self.full(None)))
        return found

    def constant(self, number: int, array: Any) -> Any:
        if not versions.is_shaped(jax.typeof(array)) or not is_inexact(array):
            return None
        if isinstance(array, jax.core.Tracer):
            return self._unless_finite(array, self._address(IDLE_CONSTANT, (), (), number))
        return (
            None
            if np.all(np.isfinite(np.asarray(array, np.complex64)))
            else self._address(IDLE_CONSTANT, (), (), number)
        )

    def equation(
        self, place: Place, turn: Sequence[Any], ins: Sequence[Value], outs: Sequence[Any], again: Callable[..., Any]
    ) -> tuple[Sequence[Any], dict[Key, Any]]:
        name = place.site.name
        given = self._first([shadow for _, shadow in ins])
        notes: dict[Key, Any] = {}
        if given is not None and (name in _CHECKED or (name == "is_finite" and not jnp.ndim(outs[0]))):
            notes[_SINK] = given
        if name in _SAME:
            return [shadow for _, shadow in ins[: len(outs)]], notes
        return [self._shadow(place, turn, name, given, out) for out in outs], notes

    def _shadow(self, place: Place, turn: Sequence[Any], name: str, given: Any, out: Any) -> Any:
        if not is_inexact(out):
            is_check = name in _CHECKS or (name == "ne" and _compares_itself(place.site.eqn))
            return given if is_check else None
        if not any(map(_is_number, place.site.eqn.invars)):
            return None  # an iota, random bits
        own = self._address(MADE, place.loops, turn, place.number)
        if given is None:
            return self._unless_finite(out, own)
        if name not in _MOVES:
            rank, nan = given[0] >> _SHIFT, jnp.isnan(out).any()
            used = jnp.where((rank == IDLE_ARGUMENT) | (rank == IDLE_CONSTANT), 2 << _SHIFT, 0)
            bad = jnp.where(nan & ((rank == IDLE_ARGUMENT) | (rank == USED_ARGUMENT)), rank << _SHIFT, used)
            made = (given[0] == _NONE) | (nan & ((rank == IDLE_CONSTANT) | (rank == USED_CONSTANT)))
            given = jnp.where(made, own, given.at[0].add(-bad))
        else:
            given = jnp.where(given[0] == _NONE, own, given)
        return self._unless_finite(out, given)

    def part(self, array: Any, shadow: Any) -> Any:
        if shadow is None or not is_inexact(array):
            return shadow
        return self._unless_finite(array, shadow)

    def full(self, shadow: Any) -> Any:
        return jnp.asarray(self._nothing() if shadow is None else shadow)

    def join(self, a: Any, b: Any) -> Any:
        if self.length == 1:
            return jnp.minimum(a, b)
        different = a != b
        first = jnp.argmax(different)
        return jnp.where(a[first] <= b[first], a, b)

    def keys(self, start: int, end: int) -> Sequence[Key]:
        return (_SINK,)

    def empty(self, key: Key) -> Any:
        return self.full(None)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        return self.join(a, b)

    def _first(self, shadows: Sequence[Any]) -> Any:
        found = None
        for shadow in shadows:
            if shadow is not None:
                found = shadow if found is None else self.join(found, shadow)
        return found

    def _unless_finite(self, array: Any, address: Any) -> Any:
        if not is_inexact(array):
            return None
        return jnp.where(jnp.isfinite(array).all(), self._nothing(), address)

    def _nothing(self) -> np.ndarray:
        return np.array([_NONE, *[0] * (self.length - 1)], np.int32)

    def _address(self, rank: int, loops: Sequence[int], turn: Sequence[Any], number: int) -> Any:
        numbers = [*loops, number]
        parts: list[Any] = [(rank << _SHIFT) | numbers[0]]
        for i, inside in zip(turn, numbers[1:], strict=True):
            parts += [i, inside]
        parts += [0] * (self.length - len(parts))
        if all(isinstance(part, int) for part in parts):
            return np.array(parts, np.int32)
        return jnp.stack([jnp.asarray(part, jnp.int32) for part in parts])


def _is_number(v: Any) -> bool:
    aval = v.aval
    return versions.is_shaped(aval) and jnp.issubdtype(aval.dtype, np.number)


def _compares_itself(eqn: Any) -> bool:
    """Whether it is `jnp.isnan`, which asks whether a value differs from itself."""
    return eqn.invars[0] is eqn.invars[1]
