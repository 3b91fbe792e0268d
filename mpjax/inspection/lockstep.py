"""The modules of a program as groups of equations, and its evaluation in float32 and in half in lockstep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.inspection.reports import by_key
from mpjax.kernels.staging import cast
from mpjax.policy import HALF_DTYPES
from mpjax.program import compat
from mpjax.program.dtypes import is_float, is_half, is_low, narrowed, widened
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import Block, Site
from mpjax.program.host import on_host_or_compiled
from mpjax.program.interpreter import Arrays, Eager, Instrumented, Key, Notes, Probe, bound
from mpjax.program.primitives import primitive
from mpjax.program.source import informative_frame

# By name: primitives whose parameters, or whose cached traces, are read.


@dataclasses.dataclass(frozen=True)
class Group:
    """The equations of one module, or of one user function where no module has a name.

    Args:
        name: The module path, or the function as `loss_fn (train.py)`.
        path: The module path; empty for a function.
    """

    name: str
    path: str


Result = tuple[int, int]  # an equation's number and the index of a result
UNKNOWN: Result = (-1, 0)  # a value that enters or leaves a loop or a branch


class Grouped:
    """A program in groups, and the results that they read and pass on.

    Args:
        block: The program.

    Attributes:
        places: Its equations, by their number.
        groups: The group of each equation, by its number.
        passed_on: The results that an equation of another group reads or that the program returns.
        reads: The results that each equation reads, and `UNKNOWN` values, by its number.
        own: Which operands of each equation its own group computes, by its number.
    """

    def __init__(self, block: Block):
        self.block, self.places = block, {place.number: place for place in block.places()}
        self.groups, self.passed_on, self.reads = groups_of(block), set[Result](), dict[int, tuple[Result, ...]]()
        self.own = dict[int, tuple[bool, ...]]()
        self._moved = set[Result]()  # the inputs of a block, moved
        self._run(block, None)

    def evaluated(self, arrays: Sequence[Any], measured: Iterable[Result]) -> tuple[list[Values], dict[Key, ErrorNote]]:
        """The results of the program and the errors of some of its values, given its arguments."""
        arguments = [Values(widened(x), x, x) for x in map(jnp.asarray, arrays)]
        evaluation = EagerLockstep(ErrorProbe(self.places, measured))
        evaluation.own = self.own
        return evaluation.block(self.block, arguments)

    def _run(self, block: Block, given: Result | None) -> None:
        """Passes on the results of a block, whose inputs no group computes."""
        self.passed_on.update({*self._block(block, [given] * len(block.jaxpr.invars))} - {None, UNKNOWN})

    def _block(self, block: Block, ins: Sequence[Any]) -> list[Any]:
        env = block.environment(ins, [None] * len(block.jaxpr.constvars))
        return evaluate(block, env, self._rule, lambda literal, place: None)

    def _rule(self, place: Site, given: Sequence[Any]) -> Sequence[Any]:
        if is_transparent(place):
            return self._block(place.blocks[0], given)
        producers = [None if each == UNKNOWN else each for each in given]
        if passes_through(place) and producers[0] is not None:
            return producers[:1]
        inside, group = bool(place.blocks), self.groups[place.number]
        if passes_through(place):
            self._moved.add((place.number, 0))
        self.reads[place.number] = tuple(filter(None, given))
        of_group = [p is not None and self.groups[p[0]] == group for p in producers]
        pairs = list(zip(producers, of_group, strict=True))
        self.own[place.number] = tuple(same and p not in self._moved for p, same in pairs)
        self.passed_on.update(p for p, same in pairs if p is not None and (inside or not same))
        for body in place.blocks:
            self._run(body, UNKNOWN)
        return [UNKNOWN if inside else (place.number, i) for i in range(len(place.outvars))]


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


def groups_of(block: Block, outer: Group | None = None) -> dict[int, Group]:
    """The group of each equation, by its number."""
    groups: dict[int, Group] = {}
    for place in block.eqns:
        path = place.path
        group = outer if outer is not None and path in ("", outer.path) else Group(path or _function(place), path)
        groups[place.number] = group
        for inner in place.blocks:
            # JAX caches the traces of its own jitted functions, with the source lines of their first call.
            groups |= groups_of(inner, group if place.name in ("jit", "pjit") else None)
    return groups


def _function(place: Site) -> str:
    """The innermost function of a traceback that is not in a library, as `loss_fn (train.py)`."""
    frames = compat.user_frames(place.eqn)
    which = informative_frame([frame.file_name for frame in frames])
    if which is None:
        return ""
    return f"{frames[which].function_name.rpartition('.')[2]} ({frames[which].file_name.rsplit('/', 1)[-1]})"


ErrorNote = tuple[Any, Any, Any]  # largest magnitude, sums of squares in units of it, counts of inf or NaN in half only


class Values(NamedTuple):
    """The values of one variable in three evaluations of the program. A pytree, so loops can carry it.

    Args:
        exact: The value with float32 in place of half throughout.
        half: The value in the unchanged program.
        fresh: The value if the module started from exact operands: its error is the module's own.
    """

    exact: Any
    half: Any
    fresh: Any


class Lockstep(Instrumented):
    """Evaluates a program whose values are `Values`. The exact values decide loops and branches.

    Its probe gets `Values` as operands and results of an equation.

    Attributes:
        own: Which operands of each equation its own group computes.
    """

    own: Mapping[int, Sequence[bool]]

    def _constant(self, array: Any) -> Values:
        return Values(widened(array), array, array)

    def _decides(self, value: Values) -> Any:
        return value.exact

    def _with(self, probe: Probe) -> Instrumented:
        inside = Lockstep(probe)
        inside.own = self.own
        return inside

    def _evaluate(self, place: Site, ins: Arrays, iteration: Arrays) -> tuple[Arrays, Notes]:
        if is_transparent(place) or passes_through(place):
            return super()._evaluate(place, ins, iteration)
        if place.blocks:
            outs, notes = super()._evaluate(place, [*map(_from_outside, ins)], iteration)
            return [*map(_from_outside, outs)], notes
        own = self.own[place.number]
        ins = [x if is_own else _from_outside(x) for x, is_own in zip(ins, own, strict=True)]
        return super()._evaluate(place, ins, iteration)

    def _bound(self, place: Site, ins: Sequence[Any]) -> list[Any]:
        eqn = place.eqn
        if primitive(place.name).identity:
            return [ins[0]]
        eqn = _at_full_precision(eqn)
        exact = bound(eqn, [x.exact for x in ins], True)
        in_half = any(map(is_low, (*eqn.invars, *eqn.outvars)))
        half = exact if not in_half and all(x.half is x.exact for x in ins) else _as_stored(eqn, [x.half for x in ins])
        if all(x.fresh is x.half for x in ins):
            fresh = half
        elif not in_half and all(x.fresh is x.exact for x in ins):
            fresh = exact
        else:
            fresh = _as_stored(eqn, [x.fresh for x in ins])
        return [Values(*each) for each in zip(exact, half, fresh, strict=True)]


def _as_stored(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of an equation of a half program, computed in float32 and rounded to the dtypes that it stores.

    An operation of half does the same inside, and one of float32 is compiled already.
    """
    float8 = any(is_low(v) and not is_half(v) for v in (*eqn.invars, *eqn.outvars))
    if float8 or primitive(eqn.primitive.name).contracts:  # a matmul that quantises its operands
        return bound(eqn, arrays, False)
    return [
        narrowed(x, v.aval.dtype) if is_half(v) else x
        for x, v in zip(bound(eqn, arrays, True), eqn.outvars, strict=True)
    ]


class EagerLockstep(Eager, Lockstep):
    """Evaluates outside of `jit`, operation by operation."""


def _from_outside(x: Values) -> Values:
    """A value from another module, with `fresh` reset to the exact value rounded to the dtype in the program."""
    if x.half is x.exact or (dtype := jnp.result_type(x.half)) == jnp.result_type(x.exact):
        return x._replace(fresh=x.exact)
    return x._replace(fresh=narrowed(x.exact, dtype) if is_half(x.half) else cast(x.exact, dtype))


def _at_full_precision(eqn: Any) -> Any:
    """Sets the highest precision on a matmul without one, which would run in TF32 on a GPU and bfloat16 on a TPU."""
    if eqn.primitive.name not in ("dot_general", "conv_general_dilated") or eqn.params["precision"] is not None:
        return eqn
    return eqn.replace(params={**eqn.params, "precision": (lax.Precision.HIGHEST,) * 2})


class ErrorProbe(Probe):
    """Notes the errors of some results."""

    def __init__(self, places: Mapping[int, Site], measured: Iterable[Result]):
        self.noted = [("error", n, i) for n, i in sorted(measured) if is_float(places[n].outvars[i])]
        self._measured = by_key((n, i) for _, n, i in self.noted)

    def equation(self, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays, rerun: Callable[..., Any]) -> Notes:
        measured = {("error", place.number, i): outs[i] for i in self._measured.get(place.number, ())}
        return {key: error_note(*x) for key, x in measured.items() if not (x.half is x.fresh is x.exact)}

    def empty(self, key: Key) -> ErrorNote:
        return jnp.float32(0), jnp.zeros(3, jnp.float32), jnp.zeros(2, jnp.int32)

    def merge(self, key: Key, a: ErrorNote, b: ErrorNote) -> ErrorNote:
        size = jnp.maximum(a[0], b[0])
        unit = jnp.where(size > 0, size, 1)
        sums = a[1] * (a[0] / unit) ** 2 + b[1] * (b[0] / unit) ** 2
        return size, sums, a[2] + b[2]


@on_host_or_compiled
def error_note(numpy: Any, *arrays: Any) -> ErrorNote:
    """The error note of an array, given its `Values`.

    It holds the largest magnitude of `exact`; the sums of exact², (half − exact)² and (fresh − exact)² in units of its
    square; and the counts of inf or NaN in `half` and `fresh` where `exact` is finite or NaN (infinities in `exact` are
    those of masks).
    """
    exact, *others = (x.astype(np.float32) for x in arrays)
    known = numpy.isfinite(exact)
    size = numpy.max(numpy.where(known, numpy.abs(exact), np.float32(0)), initial=0)
    unit = numpy.where(size > 0, size, np.float32(1))
    finite = [known & numpy.isfinite(x) for x in others]
    deviations = [numpy.where(ok, x - exact, np.float32(0)) / unit for ok, x in zip(finite, others, strict=True)]
    sums = [numpy.sum(x**2) for x in (numpy.where(known, exact, np.float32(0)) / unit, *deviations)]
    return (
        size,
        numpy.stack(sums),
        numpy.stack([numpy.sum((known & ~ok) | numpy.isnan(exact), dtype=np.int32) for ok in finite]),
    )
