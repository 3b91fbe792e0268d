"""The provenance of an inf or NaN, from a code for each result of each equation: finite, inf or NaN.

The codes are noted while the program runs; in loops, for each iteration. The host then replays the program, with the
source of each value that is not finite in place of the value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.inspection.auditing.amplified import makes_integers
from mpjax.program.dtypes import is_float, is_inexact
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import Block, Site
from mpjax.program.host import on_host_or_compiled
from mpjax.program.interpreter import Arrays, Key, Notes, Probe
from mpjax.program.primitives import primitive
from mpjax.program.source import BACKWARD

# By name: loops, branches and checks each pass on a fault in their own way.

INF, NAN = 1, 2
MASK = -1  # of an argument: -inf, and no other inf or NaN


def _codes(numpy: Any, x: Any, axes: tuple[int, ...] | None) -> Any:
    finite, nan = numpy.isfinite(x).all(axes), numpy.isnan(x).any(axes)
    return numpy.where(finite, 0, numpy.where(nan, NAN, INF)).astype(np.int32)


@on_host_or_compiled
def code_of(numpy: Any, x: Any) -> Any:
    """The code of an array, int32."""
    return _codes(numpy, x, None)


def code_of_argument(x: Any, code: int) -> int:
    """The code of an argument, given that of any array."""
    if code != INF or jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
        return code
    return MASK if bool(jnp.max(x) < jnp.inf) else INF


class TripProbe(Probe):
    """Notes the trip count of each `while`, given the equations of a program."""

    def __init__(self, places: Iterable[Site]):
        self.noted = [("trips", p.number) for p in places if p.name == "while" and p.blocks]

    def ended(self, place: Site, trips: Any) -> dict[Key, Any]:
        return {("trips", place.number): trips}

    def empty(self, key: Key) -> Any:
        return jnp.int32(0)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        return jnp.maximum(a, b)


class CodeProbe(Probe):
    """Notes codes by kind and by the number of the equation.

        code        the code of each floating result; the index of a branch; the trip count of a `while`
        iterations  the notes of a loop's iterations
        slices      the codes of the slices of each array that a scan iterates over

    `places` are the equations of the program, by their number.
    """

    stacks = True

    def __init__(self, places: Mapping[int, Site]):
        self._places = places

    def equation(self, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays, rerun: Callable[..., Any]) -> Notes:
        return {("code", place.number, i): code_of(out) for i, out in enumerate(outs) if is_inexact(out)}

    def entering(self, place: Site, ins: Sequence[Any]) -> dict[Key, Any]:
        if place.name == "cond":
            return {("code", place.number, 0): jnp.asarray(ins[0], jnp.int32)}
        notes: dict[Key, Any] = {}
        for i in _sliced(place):
            x = place.blocks[0].split(ins)[2][i]
            codes = _codes(jnp, x, tuple(range(1, x.ndim)))
            notes["slices", place.number, i] = codes[::-1] if place.eqn.params["reverse"] else codes
        return notes

    def ended(self, place: Site, trips: Any) -> dict[Key, Any]:
        return {("code", place.number, 0): trips}

    def keys(self, block: Block) -> Sequence[Key]:
        return [*_scalars(block), *_arrays(block)]

    def empty(self, key: Key) -> Any:
        if key[0] == "code":
            return jnp.int32(0)
        place = self._places[key[1]]
        if key[0] == "slices":
            return jnp.zeros(place.eqn.params["length"], jnp.int32)
        body = place.blocks[-1]
        length = place.eqn.params["length"] if place.name == "scan" else max(self.most[place.number], 1)
        notes = self.packed(body, {key: self.empty(key) for key in self.keys(body)})
        return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), notes)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        return jax.tree.map(jnp.maximum, a, b)

    def packed(self, block: Block, notes: dict[Key, Any]) -> Any:
        scalars = [jnp.asarray(notes[key], jnp.int32) for key in _scalars(block)]
        return jnp.stack(scalars or [jnp.int32(0)]), {key: notes[key] for key in _arrays(block)}


def unpacked(block: Block, packed: Any) -> dict[Key, Any]:
    """The notes that `CodeProbe.packed` packed, by their keys."""
    scalars, arrays = packed
    return {**dict(zip(_scalars(block), np.asarray(scalars).tolist(), strict=False)), **arrays}


def _level(block: Block) -> Iterator[Site]:
    """The equations of a block and of its sub-jaxprs, except inside loops."""
    for place in block.eqns:
        yield place
        if not place.is_loop:
            for inner in place.blocks:
                yield from _level(inner)


def _scalars(block: Block) -> list[Key]:
    keys: list[Key] = []
    for place in _level(block):
        if not place.blocks:
            keys += [("code", place.number, i) for i, v in enumerate(place.eqn.outvars) if is_inexact(v)]
        elif place.name in ("cond", "while"):
            keys.append(("code", place.number, 0))
    return keys


def _arrays(block: Block) -> list[Key]:
    loops = [place for place in _level(block) if place.is_loop and place.blocks]
    slices = {place.number: [("slices", place.number, i) for i in _sliced(place)] for place in loops}
    return [key for number, keys in slices.items() for key in (("iterations", number), *keys)]


def _sliced(place: Site) -> list[int]:
    """The indices of those arrays that a scan iterates over which are real floats."""
    return [i for i, v in enumerate(place.blocks[0].split(place.eqn.invars)[2]) if is_float(v)]


# Ranks, in the order in which they are reported. An inf or NaN in an argument or constant is idle while it is only
# moved, and used after the first arithmetic on it. Once it makes a NaN, it is a fault.
BAD_ARGUMENT, MADE, USED_ARGUMENT, USED_CONSTANT, IDLE_ARGUMENT, IDLE_CONSTANT = range(6)
_SOMEWHERE = -1  # in place of an equation's number while the reader of a constant is unknown
_USED = {IDLE_ARGUMENT: USED_ARGUMENT, IDLE_CONSTANT: USED_CONSTANT}


@dataclasses.dataclass(frozen=True, order=True)
class Provenance:
    """The source of an inf or NaN. Of two with the same rank, the smaller was made first.

    Args:
        rank: The kind of source, one of the ranks above.
        when: The number of the equation, or the index of the argument. Inside loops, each loop's number and iteration
            come before it, outermost first.
    """

    rank: int
    when: tuple[int, ...]

    @property
    def number(self) -> int:
        """The equation's number, or the argument's index."""
        return self.when[-1]

    @property
    def iteration(self) -> tuple[int, ...]:
        """The number of completed iterations of each enclosing loop, outermost first."""
        return self.when[1::2]

    @property
    def place(self) -> tuple[bool, tuple[int, ...]]:
        """Where it is, whatever has become of it."""
        return self.is_argument, self.when

    @property
    def is_argument(self) -> bool:
        """Whether the source is an argument."""
        return self.rank in (BAD_ARGUMENT, USED_ARGUMENT, IDLE_ARGUMENT)

    @property
    def is_constant(self) -> bool:
        """Whether the equation only reads an infinite constant of the program."""
        return self.rank in (USED_CONSTANT, IDLE_CONSTANT)

    def indices(self, places: dict[int, Site]) -> tuple[int, ...]:
        """The iterations as indices into the arrays that the loops iterate over: a reverse scan begins at the end."""
        loops = zip((places[number].eqn.params for number in self.when[:-1:2]), self.iteration, strict=True)
        return tuple(params["length"] - 1 - i if params.get("reverse") else i for params, i in loops)


Address = Provenance | None


class _Iteration(NamedTuple):
    """One iteration of the enclosing loops; outside of loops, the program's single run.

    Args:
        when: The loops' numbers and iterations, a prefix of `Provenance.when`.
        notes: The notes of the iteration.
    """

    when: tuple[int, ...]
    notes: Mapping[Any, Any]


class Replay:
    """Replays a program with addresses in place of values.

    Args:
        block: The program.
        arguments: The code of each argument, then of each array that the program closes over: `MASK` if it holds -inf
            as a mask or a logarithm of 0 does, and no other inf or NaN. Of a NaN made from it, the operation is the
            source.
        codes: The code of each result.
        notes: The notes of a `CodeProbe`.
        beside: Whether a fault is known, beside which an infinite argument counts in any result.

    Attributes:
        fault: The first fault that reached a result of the program or a check for finite values; None if none did.
        results: The sources of results that are not finite.
    """

    def __init__(
        self, block: Block, arguments: Sequence[int], codes: Sequence[int], notes: Mapping[Any, Any], beside: bool
    ) -> None:
        self.codes = codes
        self.with_blocks = {place.number for place in block.places() if place.blocks}
        self.masks = {i for i, code in enumerate(arguments) if code == MASK}
        self.checked: set[Provenance] = set()
        self.made: set[tuple[int, ...]] = set()  # where an inf or NaN was made, which may reach no result
        self.converted: dict[Provenance, list[Site]] = {}  # the conversions to integers that hide one
        self.from_masks: dict[Address, int] = {}  # the mask from which an equation made a NaN
        self.passed_on: set[Address] = set()  # by a `where` of the forward pass
        self.entries: dict[Address, Provenance] = {}  # the equation through which a fault enters the backward pass
        given = [Provenance(IDLE_ARGUMENT, (i,)) if code else None for i, code in enumerate(arguments)]
        count = len(block.jaxpr.invars)
        results = self.block(block, given[:count], _Iteration((), notes), given[count:])
        self.results = [address if code else None for code, address in zip(codes, results, strict=True)]
        found = list(self.checked)
        for v, address in zip(block.jaxpr.outvars, self.results, strict=True):
            if address is not None:
                counts = beside and address.is_argument and address.number not in self.masks
                if counts or address.rank <= (MADE if v.aval.shape else USED_CONSTANT):
                    found.append(address)
        self.fault = min(found, default=None)

    def block(
        self, block: Block, addresses: Sequence[Address], iteration: _Iteration, consts: Sequence[Address] | None = None
    ) -> list[Address]:
        if consts is None:
            consts = [_constant(c, (*iteration.when, _SOMEWHERE)) for c in block.consts]

        def rule(place: Site, ins: list[Address]) -> list[Address]:
            return self._sub_jaxprs(place, ins, iteration) if place.blocks else self._computed(place, ins, iteration)

        def constant(literal: Any, place: Site | None) -> Address:
            return _constant(literal.val, (*iteration.when, place.number if place else _SOMEWHERE))

        return evaluate(block, block.environment(addresses, consts), rule, constant)

    def _computed(self, place: Site, ins: Sequence[Address], iteration: _Iteration) -> list[Address]:
        name, outvars, row = place.name, place.eqn.outvars, primitive(place.name)
        when = (*iteration.when, place.number)
        ins = [self._read_here(address, when) for address in ins]
        if row.whole:
            return list(ins[: len(outvars)])
        given = min((address for address in ins if address), default=None)
        # A check for finite values ends in a reduction to one boolean, or in one comparison of a scalar.
        if given is not None and row.logic and (row.kernel or (name == "is_finite" and not outvars[0].aval.shape)):
            self.checked.add(given)
        is_mask = given is not None and given.is_argument and given.number in self.masks
        if given is not None and makes_integers(place) and not (is_mask or given.is_constant):
            self.converted.setdefault(given, []).append(place)
        own = Provenance(MADE, when)
        is_nan = name == "ne" and place.invars[0] is place.invars[1]  # as `jnp.isnan` does
        is_check = row.logic or (row.keeps_values and not row.kernel) or is_nan

        def of_result(i: int, v: Any) -> Address:
            if is_inexact(v):
                return self._address(int(iteration.notes["code", place.number, i]), given, own, row.keeps_values)
            return given if is_check else None

        outs = [of_result(i, v) for i, v in enumerate(outvars)]
        if own in outs:
            self.made.add(when)
            if place.phase == BACKWARD:
                self.entries.setdefault(own, own)
        if given is not None and outs == [given]:
            if place.phase == BACKWARD:
                self.entries.setdefault(given, own)
            elif name == "select_n":
                self.passed_on.add(given)
        return outs

    def _address(self, code: int, given: Address, own: Provenance, moves: bool) -> Address:
        """The address of a result, from that of its operands."""
        if not code:
            return None
        if given is None:
            return own
        if moves or given.rank in (BAD_ARGUMENT, MADE):
            return given
        if code == NAN and given.is_argument and given.number not in self.masks:
            return Provenance(BAD_ARGUMENT, given.when)
        if code == NAN:
            self.from_masks |= {own: given.number} if given.is_argument else {}
            return own
        return Provenance(_USED.get(given.rank, given.rank), given.when)

    def _read_here(self, address: Address, when: tuple[int, ...]) -> Address:
        """Assigns a constant that was passed to a sub-jaxpr to the equation there that reads it."""
        if address is None or address.rank != IDLE_CONSTANT or address.number not in self.with_blocks | {_SOMEWHERE}:
            return address
        return Provenance(IDLE_CONSTANT, when)

    def _sub_jaxprs(self, place: Site, ins: Sequence[Address], iteration: _Iteration) -> list[Address]:
        params, notes = place.eqn.params, iteration.notes
        if place.is_loop:
            length = params["length"] if place.name == "scan" else int(notes["code", place.number, 0])
            return self._iterations(place, length, ins, iteration)
        if place.name == "cond":
            taken = min(max(int(notes["code", place.number, 0]), 0), len(place.blocks) - 1)
            return self.block(place.blocks[taken], ins[1:], iteration)
        return self.block(place.blocks[0], ins, iteration)

    def _iterations(self, place: Site, length: int, ins: Sequence[Address], outer: _Iteration) -> list[Address]:
        body, stacked = place.blocks[-1], outer.notes["iterations", place.number]
        consts, carry, sliced = body.split(ins)
        xs = [(address, outer.notes.get(("slices", place.number, i))) for i, address in enumerate(sliced)]
        ys: list[Address] = [None] * (len(body.jaxpr.outvars) - len(carry))
        for i in range(length):
            parts = [address if codes is None or codes[i] else None for address, codes in xs]
            notes = unpacked(body, jax.tree.map(lambda x, i=i: x[i], stacked))
            outs = self.block(body, [*consts, *carry, *parts], _Iteration((*outer.when, place.number, i), notes))
            carry, new = outs[: len(carry)], outs[len(carry) :]
            ys = [old if old is not None else address for old, address in zip(ys, new, strict=True)]
        return [*carry, *ys]


def _constant(value: Any, when: tuple[int, ...]) -> Address:
    """The address of a constant in the program, read by the equation at `when`."""
    if not jnp.issubdtype(jnp.result_type(value), jnp.inexact) or np.all(np.isfinite(np.asarray(value, np.complex64))):
        return None
    return Provenance(IDLE_CONSTANT, when)
