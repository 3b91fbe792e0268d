"""`find_nonfinite`: the first operation that made an inf or NaN which reached a result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr.interpreter import (
    COMPILER_OPTIONS,
    Block,
    Key,
    Place,
    Probe,
    Run,
    is_half,
    is_inexact,
    lay_out,
    widened,
)
from mpjax._jaxpr.source import BACKWARD
from mpjax.casting.transform import Program
from mpjax.inspection.nonfinite.codes import CodeProbe, WatchProbe, code_of, watched
from mpjax.inspection.nonfinite.diagnosis import Evidence, verdict_of
from mpjax.inspection.nonfinite.provenance import Origin, first_origin
from mpjax.inspection.program import argument_name, traced_call
from mpjax.inspection.reports import Report, Section
from mpjax.policy import HALF_DTYPES


@dataclasses.dataclass(frozen=True)
class OperandRange:
    """The range of an array.

    Args:
        dtype, shape: of the array.
        min, max: over its finite elements; inf and -inf if there are none.
        min_nonzero: the smallest size of a nonzero finite element; inf if there are none.
        nonfinite: how many elements are inf or NaN.
    """

    dtype: str
    shape: tuple[int, ...]
    min: float
    max: float
    min_nonzero: float
    nonfinite: int

    def __str__(self) -> str:
        shape = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        text = f"{shape} in [{self.min:.4g}, {self.max:.4g}]"
        if self.min > self.max:
            text = f"{shape} with no finite element"
        elif math.isfinite(self.min_nonzero):
            text += f", smallest nonzero {self.min_nonzero:.3g}"
        return text + (f", {self.nonfinite} inf or NaN" if self.nonfinite else "")


@dataclasses.dataclass(frozen=True)
class NonFinite(Report):
    """Where an inf or NaN came from; `print` it.

    Args:
        primitive: the operation, in JAX's name; `"argument"` if it was in what the function was given.
        module: module path, from named scopes.
        source: the line, `file.py:12`.
        kind: `"inf"` or `"nan"`, of the first such element.
        verdict: what the same point gives in float32, and what follows from it.
        direction: `"forward"` or `"backward"`; what a remat computes again is forward.
        iteration: the index in the loop around it (in `scan`'s own order of its inputs), of nested loops all,
            outermost first; None outside loops.
        inputs: the ranges of its floating inputs.
        output: dtype and shape of its result, as `float16[8,4]`.
        count: how many elements of the result are inf or NaN.
        element: the index of the first of them.
        batch_element: the index in the batch, if the result's leading axis is taken for the batch (see
            `find_nonfinite`).
        float32_value: that element in float32; None if it was not reached there.
        argument: the tree path of the argument that held it, if one did.
    """

    primitive: str
    module: str
    source: str
    kind: str
    verdict: str
    direction: str = "forward"
    iteration: int | tuple[int, ...] | None = None
    inputs: tuple[OperandRange, ...] = ()
    output: str = ""
    count: int = 0
    element: tuple[int, ...] = ()
    batch_element: int | None = None
    float32_value: float | None = None
    argument: str | None = None

    @property
    def title(self) -> str:
        """The page's title."""
        return f"{'inf' if self.kind == 'inf' else 'NaN'} found"

    def to_dict(self) -> dict[str, Any]:
        """The report for programs."""
        return {"found": dataclasses.asdict(self)}

    def table(self) -> list[dict[str, Any]]:
        """One row, without the operands."""
        return [{name: value for name, value in dataclasses.asdict(self).items() if name != "inputs"}]

    def failure(self, **checks: Any) -> str:
        """Finding one is what the command line exits with 1 for."""
        return self.title

    def sections(self) -> list[Section]:
        """The report for people."""
        return [Section("", self._text())]

    def _text(self) -> str:
        what = "inf" if self.kind == "inf" else "NaN"
        if self.argument is not None:
            return f"{what} in {self.argument}: {self.verdict}"
        where = f"{self.primitive} at {self.source or 'an unknown line'}"
        lines = [
            f"{what} made by {where}, module {self.module or '-'}, {self.direction} pass"
            + (f", iteration {self.iteration}" if self.iteration is not None else ""),
            f"  {self.verdict}",
            f"  output {self.output}: {self.count} inf or NaN, first at {self.element}"
            + (f", batch element {self.batch_element}" if self.batch_element is not None else ""),
        ]
        return "\n".join([*lines, *(f"  input {i}: {operand}" for i, operand in enumerate(self.inputs))])


def find_nonfinite(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> NonFinite | None:
    """The first operation that made an inf or NaN from finite inputs, in the forward or the backward pass.

    The program that `fun` traces to is run under `jit`, operation by operation as it was written, with a code beside
    each result: finite, inf, NaN. From the codes follows for each value that is not finite where that came from:

        result finite                    nowhere (a masked -inf that softmax took away, a `where`)
        an operand is not finite         where that came from
        else                             this operation

    What counts is what reaches a result of `fun` or a check for finite values (`jnp.isfinite(x).all()`, so
    also the check that lets mpjax skip a step). Infinities that the program itself writes, or that are in an
    argument, are no fault as long as they are only moved, masked, compared and added; where they reach a scalar
    result or a check, or make a NaN, they are named. Only if there is a fault, another run takes the ranges
    there and runs the same point in float32. No tensor goes to the host.

    Args:
        fun: any function of arrays or pytrees: a loss function, `mpjax.value_and_grad(loss_fn, opt_state)`, a train
            step, jitted or not. NNX objects in its arguments are left as they are.
        args, kwargs: what it is called with: arrays, in whatever sharding. The last of `args` is taken for the batch
            where all its arrays have the same leading size and no other argument has a leaf of the result's shape.

    Returns:
        The fault, or None if there is none.

    Raises:
        TypeError: an argument is a shape without values, or the call is inside `jit`.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> x = jnp.array([[1.0, 2.0], [300.0, 4.0]], jnp.float16)
        >>> found = mpjax.find_nonfinite(lambda x: jnp.sum(x * x, axis=1), x)
        >>> found.primitive, found.kind, found.element
        ('mul', 'inf', (1, 0))
        >>> found.verdict
        'overflow of float16 here (float32 value 90,000)'

    Source: the checks by operation of `tf.debugging.enable_check_numerics` (TensorFlow) and `jax_debug_nans`.
    """
    program = traced_call("find_nonfinite", fun, args, kwargs)
    block = lay_out(program.jaxpr)
    origin = _search(program, block)
    if origin is None:
        return None
    if origin.is_argument:
        return _in_argument(program, block, origin.number)
    return _examined(program, block, origin, _batch_of(args))


def _search(program: Program, block: Block) -> Origin | None:
    """Where the first fault is; a program whose results and checks are all finite is run but once."""
    leaves = [*program.arrays, *block.consts]
    count = len(program.arrays)

    def run(probe: Probe, leaves: Sequence[Any]) -> Any:
        outs, notes = Run(probe).block(block, leaves[:count], consts=leaves[count:])
        return _codes(leaves), _codes(outs), notes

    _, outs, notes = _run(functools.partial(run, WatchProbe()), leaves)
    failed, trips = watched(notes)
    if not failed and not any(outs):
        return None
    probe = CodeProbe(block, trips)

    def run_all(leaves: Sequence[Any]) -> Any:
        given, outs, notes = run(probe, leaves)
        return given, outs, probe.packed(block, {**{key: probe.empty(key) for key in probe.keys(block)}, **notes})

    return first_origin(block, *_run(run_all, leaves))


def _run(fun: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    return jax.device_get(jax.jit(fun, compiler_options=COMPILER_OPTIONS)(leaves))


def _codes(arrays: Sequence[Any]) -> list[Any]:
    return [code_of(jnp.asarray(x)) if is_inexact(x) else np.int32(0) for x in arrays]


class _PointProbe(Probe):
    """Takes the ranges at one turn of one equation."""

    def __init__(self, target: Place, turn: Sequence[int], index: Any = None):
        self.target, self.turn, self.index = target, turn, index

    def equation(
        self, place: Place, turn: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any], again: Callable[..., Any]
    ) -> dict[Key, Any]:
        if place.number != self.target.number:
            return {}
        hit = jnp.asarray(True)
        for now, then in zip(turn, self.turn, strict=True):
            hit &= now == then
        return {("point",): (hit, self._note(ins, outs, again))}

    def _note(self, ins: Sequence[Any], outs: Sequence[Any], again: Callable[..., Any]) -> Any:
        floats = [out for out in outs if is_inexact(out)]
        counts = jnp.stack([jnp.sum(~jnp.isfinite(out)) for out in floats])
        firsts = jnp.stack([jnp.argmax(~jnp.isfinite(out).ravel()) for out in floats])
        which = jnp.argmax(counts > 0) if self.index is None else self.index[0]
        index = firsts[which] if self.index is None else self.index[1]
        wide = [out for out in again([widened(x) for x in ins]) if is_inexact(out)] if self.index is None else floats
        return {
            "index": jnp.stack([which, index]),
            "count": counts[which],
            "value": _at(floats, which, index),
            "float32": _at(wide, which, index),
            "operands": jnp.stack([_operand_at(x, floats[0].shape, index) for x in ins]),
            "ranges": [_range(x) for x in ins if is_inexact(x)],
        }

    def keys(self, block: Block) -> Sequence[Key]:
        return (("point",),) if block.start <= self.target.number < block.end else ()

    def empty(self, key: Key) -> Any:
        eqn = self.target.site.eqn
        ranges = [np.full(4, np.nan, np.float32) for v in eqn.invars if is_inexact(v)]
        nothing, operands = np.float32(np.nan), np.full(len(eqn.invars), np.nan, np.float32)
        note = {"index": np.zeros(2, np.int32), "count": np.int32(0), "value": nothing, "float32": nothing}
        return jax.tree.map(jnp.asarray, (False, {**note, "operands": operands, "ranges": ranges}))

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(b[0], y, x), a, b)


def _at(arrays: Sequence[Any], which: Any, index: Any) -> Any:
    """An element of one of several arrays, as a float32."""
    values = [_real(x).ravel()[jnp.minimum(index, x.size - 1)] if x.size else jnp.float32(jnp.nan) for x in arrays]
    return jnp.stack(values)[which]


def _operand_at(x: Any, shape: tuple[int, ...], index: Any) -> Any:
    """The element of an operand of an elementwise operation that an element of the result was made from."""
    if not hasattr(x, "shape") or not jnp.issubdtype(jnp.result_type(x), jnp.number):
        return jnp.float32(jnp.nan)
    if jnp.shape(x) == shape:
        return _real(x).ravel()[index]
    return _real(x) if jnp.ndim(x) == 0 else jnp.float32(jnp.nan)


def _real(x: Any) -> Any:
    return jnp.real(x).astype(jnp.float32)


def _range(x: Any) -> Any:
    """Smallest, largest, smallest nonzero size of the finite elements, and the number of others."""
    finite, x = jnp.isfinite(x), _real(x)
    size = jnp.where(finite & (x != 0), jnp.abs(x), jnp.inf)
    low = jnp.min(x, where=finite, initial=jnp.inf)
    high = jnp.max(x, where=finite, initial=-jnp.inf)
    return jnp.stack([low, high, jnp.min(size, initial=jnp.inf), jnp.sum(~finite).astype(jnp.float32)])


def _examined(program: Program, block: Block, origin: Origin, batch: _Batch | None) -> NonFinite:
    """The ranges at one point, and the same point in float32."""
    places = {place.number: place for place in block.places()}
    place, count = places[origin.number], len(program.arrays)

    def run(leaves: Sequence[Any]) -> Any:
        probe = _PointProbe(place, origin.turn)
        here = Run(probe).block(block, leaves[:count], consts=leaves[count:])[1]["point",][1]
        wide = [widened(leaf) for leaf in leaves]
        probe = _PointProbe(place, origin.turn, here["index"])
        there = Run(probe, wide=True).block(block, wide[:count], consts=wide[count:])[1]["point",]
        return here, there

    here, (reached, there) = _run(run, [*program.arrays, *block.consts])
    eqn = place.site.eqn
    which, index = map(int, here["index"])
    out = [v.aval for v in eqn.outvars if is_inexact(v)][which]
    element = tuple(int(i) for i in np.unravel_index(index, out.shape)) if out.shape else ()
    value = float(there["value"]) if reached else None
    evidence = Evidence(
        primitive=place.site.name,
        kind="nan" if np.isnan(here["value"]) else "inf",
        half=_half_name(block, eqn),
        half_here=is_half(eqn.outvars[0]) or any(map(is_half, eqn.invars)),
        operands=tuple(map(float, here["operands"])),
        operands32=tuple(map(float, there["operands"])) if reached else (),
        local=float(here["float32"]),
        float32=value,
        backward=place.site.phase == BACKWARD,
        constant=origin.is_constant,
    )
    floats = [v.aval for v in eqn.invars if is_inexact(v)]
    iteration = origin.iteration(places)
    return NonFinite(
        primitive=place.site.name,
        module=place.site.path,
        source=place.site.source,
        kind=evidence.kind,
        verdict=verdict_of(evidence),
        direction="backward" if evidence.backward else "forward",
        iteration=iteration[0] if len(iteration) == 1 else iteration or None,
        inputs=tuple(
            OperandRange(str(aval.dtype), aval.shape, float(found[0]), float(found[1]), float(found[2]), int(found[3]))
            for aval, found in zip(floats, here["ranges"], strict=True)
        ),
        output=f"{out.dtype}[{','.join(map(str, out.shape))}]",
        count=int(here["count"]),
        element=element,
        batch_element=element[0] if batch and batch.leads(out.shape) else None,
        float32_value=value,
    )


def _half_name(block: Block, eqn: Any) -> str | None:
    """The half dtype of an equation, or, if it has none, of the program."""
    near = [v.aval.dtype.name for v in (*eqn.outvars, *eqn.invars) if is_half(v)]
    far = (v.aval.dtype.name for p in block.places() for v in p.site.eqn.outvars if is_half(v))
    given = (v.aval.dtype.name for v in block.jaxpr.invars if is_half(v))
    return near[0] if near else next(far, None) or next(given, None)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """What is taken for the batch: its size, and the shapes that other arguments have."""

    size: int
    others: frozenset[tuple[int, ...]]

    def leads(self, shape: tuple[int, ...]) -> bool:
        return bool(shape) and shape[0] == self.size and shape not in self.others


def _batch_of(args: Sequence[Any]) -> _Batch | None:
    if not args:
        return None
    sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(args[-1]) if jnp.ndim(x)}
    others = frozenset(jnp.shape(x) for x in jax.tree.leaves(args[:-1]) if hasattr(x, "shape"))
    return _Batch(sizes.pop()[0], others) if len(sizes) == 1 else None


def _in_argument(program: Program, block: Block, index: int) -> NonFinite:
    """A fault that was given: which leaf, how many elements, where the first."""
    array = jnp.asarray([*program.arrays, *block.consts][index])
    if index < len(program.arrays):
        name = argument_name(program.names[index])
    else:
        name = f"an array that the function closes over, {array.dtype}{list(array.shape)}"
    bad = jnp.logical_not(jnp.isfinite(array)).ravel()
    first, count = int(jnp.argmax(bad)), int(jnp.sum(bad))
    kind = "nan" if bool(jnp.isnan(array.ravel()[first])) else "inf"
    element = tuple(int(i) for i in np.unravel_index(first, array.shape)) if array.shape else ()
    half = f" (it is {array.dtype}: it may have overflowed when it was cast)" if array.dtype in HALF_DTYPES else ""
    return NonFinite(
        primitive="argument",
        module="",
        source="",
        kind=kind,
        verdict=f"{count:,} of {array.size:,} elements were inf or NaN before the call, first at {element}{half}: "
        "look at what made it, a step before that was not skipped, or the data",
        output=f"{array.dtype}[{','.join(map(str, array.shape))}]",
        count=count,
        element=element,
        argument=name,
    )
