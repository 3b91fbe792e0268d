"""One iteration of one equation: the ranges of its operands, an element of its result, and other elements instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.inspection.auditing.constants import Lost
from mpjax.inspection.nonfinite.provenance import Provenance
from mpjax.program import compat
from mpjax.program.dtypes import is_inexact, widened
from mpjax.program.graph import Site
from mpjax.program.host import in_host_memory
from mpjax.program.interpreter import Arrays, Key, Notes, Probe, bound


def at_iteration(iteration: Sequence[Any], target: Sequence[int]) -> Any:
    """Whether the loops around an equation are at the target iteration."""
    hit: Any = np.bool_(True)
    for now, then in zip(iteration, target, strict=True):
        hit &= now == then
    return hit


def is_number(x: Any) -> bool:
    """Whether a value or a variable is an array of numbers: floats, indices, labels."""
    aval = getattr(x, "aval", None) or jax.typeof(x)
    return compat.is_shaped(aval) and jnp.issubdtype(aval.dtype, jnp.number)


class Reached(Exception):
    """Ends an evaluation at the target of a `PointProbe`; holds its note."""


class PointProbe(Probe):
    """Measures the ranges at one iteration of one equation.

    Args:
        target: The equation.
        iteration: The number of completed iterations of each enclosing loop, outermost first.
        element: The element to read, as (index of the result, flat index, device); None for the first that is not
            finite.
        wide: Whether the program runs in float32.
    """

    def __init__(self, target: Site, iteration: Sequence[int], element: Any, wide: bool):
        self.target, self.iteration, self.arrays, self.wide = target, iteration, element, wide
        self.noted = [("point", target.number)]

    def equation(self, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays, rerun: Callable[..., Any]) -> Notes:
        if place.number != self.target.number:
            return {}
        wide = outs if self.wide else rerun(list(map(widened, ins)))
        arrays, rest = [list(ins), list(outs), list(wide)], (self.arrays, self.device())
        leaves = jax.tree.leaves(arrays)
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((leaves, rest))):
            return {self.noted[0]: (at_iteration(iteration, self.iteration), _measured(jnp, arrays, *rest))}
        if all(map(in_host_memory, leaves)):  # NumPy takes less time than compiling for these shapes.
            arrays = jax.tree.map(lambda x: np.asarray(x) if is_number(x) else x, arrays)
            raise Reached((True, _measured(np, arrays, *rest)))
        raise Reached((True, _compiled(arrays, *rest)))

    def passed(self, notes: Notes) -> None:
        if self.noted[0] in notes:
            raise Reached(notes[self.noted[0]])

    def empty(self, key: Key) -> Any:
        count, ranges = len(self.target.invars), sum(map(is_number, self.target.invars))
        numbers = {"index": jnp.zeros(3, jnp.int32), "count": jnp.int32(0), "value": jnp.float32(0)}
        nothing = {"chosen": jnp.array(False), "float32": jnp.float32(0), "operands": jnp.zeros(count, jnp.float32)}
        return jnp.array(False), {**numbers, **nothing, "ranges": [jnp.zeros(4, jnp.float32)] * ranges}

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        later = b[0] & ~(a[0] & a[1]["chosen"])  # the first device that has it
        return jax.tree.map(lambda x, y: jnp.where(later, y, x), a, b)


def finite_but(probe: Probe, alike: Collection[int], fault: Provenance | None = None) -> Callable[..., Sequence[Any]]:
    """The `replace` of an `Instrumented`, after a span of positions and a seed: replaces elements that are not finite.

    These are the elements of some equations, but those of a fault inside of the span. The position of an element is its
    flat index, counted after the elements of all earlier devices. An array that several devices hold counts as that of
    the first of them.

    Args:
        probe: Knows the device.
        alike: The numbers of the equations.
        fault: The fault.
    """

    def replace(low: Any, high: Any, seed: Any, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays) -> Arrays:
        if place.number not in alike:
            return outs
        hit: Any = np.bool_(False)
        if fault is not None and place.number == fault.number:
            hit = at_iteration(iteration, fault.iteration)

        def finite_but_span(x: Any) -> Any:
            position = np.arange(x.size, dtype=np.int32).reshape(x.shape) + probe.device(x) * x.size
            return finite(x, seed, hit & (position >= low) & (position < high))

        return [finite_but_span(x) if is_inexact(x) else x for x in outs]

    return replace


def with_constants(held: Sequence[Lost], then: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """A `replace` that gives equations numbers in place of constants that were rounded, before another `replace`."""

    def replace(low: Any, high: Any, seed: Any, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays) -> Arrays:
        constants = {lost.operand: lost.instead for lost in held if lost.site.eqn is place.eqn}
        if constants:
            avals = [v.aval for v in place.invars]
            numbers = {i: jnp.full(avals[i].shape, float(number), avals[i].dtype) for i, number in constants.items()}
            outs = bound(place.eqn, [numbers.get(i, x) for i, x in enumerate(ins)], False)
        return then(low, high, seed, place, iteration, ins, outs)

    return replace


def finite(x: Any, seed: Any, kept: Any = np.bool_(False)) -> Any:  # noqa: B008
    """An array with other numbers, from .5 to .9, in place of the elements that are not finite, except the kept.

    They differ from one another, and with the seed: what a program makes of equal numbers, or of 1, may be a fault.
    """
    numpy: Any = jnp
    if in_host_memory(x) and not isinstance(kept, jax.core.Tracer) and not isinstance(seed, jax.core.Tracer):
        numpy, x = np, np.asarray(x)
    place = np.arange(x.size, dtype=np.float32).reshape(x.shape)
    others = (0.5 + 0.4 * ((0.618 * place + 0.37 * seed) % 1)).astype(x.dtype)
    return numpy.where(~kept & ~numpy.isfinite(x), others, x)


def _measured(numpy: Any, arrays: Sequence[Arrays], element: Any, device: Any) -> dict[str, Any]:
    """The note of a `PointProbe`, by NumPy or `jax.numpy`, of an equation's operands, results, and float32 results."""
    ins, outs, wide = (list(map(compat.replicated, each)) for each in arrays)
    floats, floats32 = (list(filter(is_inexact, each)) for each in (outs, wide))
    bad = [~numpy.isfinite(x).ravel() for x in floats]
    counts = numpy.stack([numpy.sum(x, dtype=np.int32) for x in bad])
    which = numpy.argmax(counts > 0).astype(np.int32)
    index, device = numpy.stack([numpy.argmax(x).astype(np.int32) for x in bad])[which], numpy.asarray(device, np.int32)
    chosen = counts[which] > 0
    if element is not None:
        which, index, where = element
        chosen = device == where
    return {
        "chosen": chosen,
        "index": numpy.stack([which, index, device]),
        "count": counts[which],
        "value": _at(numpy, floats, which, index),
        "float32": _at(numpy, floats32, which, index),
        "operands": numpy.stack([_operand_at(numpy, x, floats[0].shape, index) for x in ins]),
        "ranges": [_range(numpy, x) for x in ins if is_number(x)],
    }


_compiled = jax.jit(functools.partial(_measured, jnp))


def _at(numpy: Any, arrays: Arrays, which: Any, index: Any) -> Any:
    """An element of one of several arrays, as a float32."""
    nan = np.float32(np.nan)
    values = [_real(numpy, x).ravel()[numpy.minimum(index, x.size - 1)] if x.size else nan for x in arrays]
    return numpy.stack(values)[which]


def _operand_at(numpy: Any, x: Any, shape: tuple[int, ...], index: Any) -> Any:
    """The element of an operand that an elementwise operation computes an element of its result from; else NaN."""
    nan = np.float32(np.nan)
    if not compat.is_shaped(jax.typeof(x)) or not jnp.issubdtype(jnp.result_type(x), jnp.number):
        return nan
    if np.ndim(x) == len(shape) > 0 and all(n in (1, size) for n, size in zip(np.shape(x), shape, strict=True)):
        return numpy.broadcast_to(_real(numpy, x), shape).ravel()[index]
    return _real(numpy, x) if np.ndim(x) == 0 else nan


def _real(numpy: Any, x: Any) -> Any:
    return numpy.real(x).astype(np.float32)


def _range(numpy: Any, x: Any) -> Any:
    """Minimum, maximum and smallest nonzero magnitude of the finite elements, and the number of other elements."""
    finite, x = numpy.isfinite(x), _real(numpy, x)
    size = numpy.where(finite & (x != 0), numpy.abs(x), np.inf)
    low = numpy.min(x, where=finite, initial=np.inf)
    high = numpy.max(x, where=finite, initial=-np.inf)
    return numpy.stack([low, high, numpy.min(size, initial=np.inf), numpy.sum(~finite).astype(np.float32)])
