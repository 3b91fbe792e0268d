"""A code for each result of each equation of a program: 0 for finite, `INF`, `NAN`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._jaxpr.interpreter import Key, Probe, is_float, is_inexact
from mpjax._jaxpr.program import Block, Site
from mpjax.inspection.program import in_host_memory

INF, NAN = 1, 2
_FOUND = ("found",)


# Up to this many elements, NumPy is faster than compiling a program for the shape.
_SMALL = 2**20


def code_of(x: Any) -> Any:
    """The code of an array, int32: one reduction."""
    if not in_host_memory(x) or x.size > _SMALL:
        return _compiled_code(x)
    array = np.asarray(x)
    return np.int32(0 if np.isfinite(array).all() else NAN if np.isnan(array).any() else INF)


@jax.jit
def _compiled_code(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.max(_compiled_code(lax.real(x)), _compiled_code(lax.imag(x)))
    return _reduced(x, tuple(range(x.ndim)))


def _reduced(x: Any, axes: tuple[int, ...]) -> Any:
    zero = lax.full_like(x, 0, np.int32)
    inf, nan = lax.full_like(x, INF, np.int32), lax.full_like(x, NAN, np.int32)
    codes = lax.select(lax.is_finite(x), zero, lax.select(lax.ne(x, x), nan, inf))
    return (
        lax.reduce_max(codes, axes) if x.size else jnp.zeros([n for i, n in enumerate(x.shape) if i not in axes], int)
    )


class WatchProbe(Probe):
    """Notes only whether a check for finite values failed, and the trip count of each `while`."""

    def equation(
        self, place: Site, iteration: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any], rerun: Callable[..., Any]
    ) -> dict[Key, Any]:
        name = place.name
        if name == "is_finite":
            return {_FOUND: ~jnp.all(outs[0])}
        if name == "ne" and place.eqn.invars[0] is place.eqn.invars[1]:
            return {_FOUND: jnp.any(outs[0])}
        return {}

    def ended(self, place: Site, trips: Any) -> dict[Key, Any]:
        return {("trips", place.number): trips}

    def keys(self, block: Block) -> Sequence[Key]:
        return [_FOUND, *(("trips", p.number) for p in block.places() if p.name == "while" and p.blocks)]

    def empty(self, key: Key) -> Any:
        return jnp.asarray(False) if key == _FOUND else jnp.int32(0)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        return jnp.maximum(a, b)


def watched(notes: Mapping[Key, Any]) -> tuple[bool, dict[int, int]]:
    """The notes of a `WatchProbe`: whether a check failed, and the trip count of each `while` by its number."""
    trips = {key[1]: int(n) for key, n in notes.items() if key != _FOUND}
    return bool(notes.get(_FOUND, False)), trips


class CodeProbe(Probe):
    """Notes codes by kind and by the number of the equation.

        code        the code of each floating result; the index of a branch; the trip count of a `while`
        iterations  the notes of a loop's iterations
        slices      the codes of the slices of each array that a scan iterates over

    Args:
        block: The program.
        trips: The largest trip count of each `while`, by its number.
    """

    stacks = True

    def __init__(self, block: Block, trips: Mapping[int, int]):
        self._places = {place.number: place for place in block.places()}
        self._trips = trips

    def equation(
        self, place: Site, iteration: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any], rerun: Callable[..., Any]
    ) -> dict[Key, Any]:
        return {("code", place.number, i): code_of(out) for i, out in enumerate(outs) if is_inexact(out)}

    def entering(self, place: Site, ins: Sequence[Any]) -> dict[Key, Any]:
        if place.name == "cond":
            return {("code", place.number, 0): jnp.asarray(ins[0], jnp.int32)}
        notes: dict[Key, Any] = {}
        for i in _sliced(place):
            x = place.blocks[0].split(ins)[2][i]
            codes = _reduced(x, tuple(range(1, x.ndim)))
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
        length = place.eqn.params["length"] if place.name == "scan" else self.trips(place)
        notes = self.packed(body, {key: self.empty(key) for key in self.keys(body)})
        return jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), notes)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        return jax.tree.map(jnp.maximum, a, b)

    def packed(self, block: Block, notes: dict[Key, Any]) -> Any:
        scalars = [jnp.asarray(notes[key], jnp.int32) for key in _scalars(block)]
        return jnp.stack(scalars or [jnp.int32(0)]), {key: notes[key] for key in _arrays(block)}

    def trips(self, place: Site) -> int:
        return max(self._trips[place.number], 1)


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
    keys: list[Key] = []
    for place in _level(block):
        if place.is_loop and place.blocks:
            keys += [("iterations", place.number), *(("slices", place.number, i) for i in _sliced(place))]
    return keys


def _sliced(place: Site) -> list[int]:
    """The indices of those arrays that a scan iterates over which are real floats."""
    if place.name != "scan":
        return []
    return [i for i, v in enumerate(place.blocks[0].split(place.eqn.invars)[2]) if is_float(v)]
