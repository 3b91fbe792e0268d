"""Instrumented evaluation: evaluates a program with a hook (a probe) at each equation.

The probe's notes are returned in addition to the program's results. `Instrumented` is used under `jit`, which compiles
the instrumented program as a whole. `Eager` is used outside of it: operations run one by one, and repeated layers share
their compiled operations. That takes a fraction of the time of compiling a deep model.

`jit`, `remat` and functions with custom derivative rules are entered by evaluating their sub-jaxprs. `scan`, `while`,
`cond` and `shard_map` are re-issued through their public functions, with the probe's notes in the carry. Any other
higher-order primitive (a Pallas kernel, a callback) is called unchanged; the probe gets only its operands and results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from mpjax.program import compat
from mpjax.program.dtypes import is_half, is_low, widened
from mpjax.program.evaluator import bind, cond, evaluate, scan, shard_map, strong, while_loop
from mpjax.program.formats import HALF_DTYPES
from mpjax.program.graph import Block, Site, lay_out, manual_axes
from mpjax.program.host import bind_on_host
from mpjax.program.primitives import Op, primitive
from mpjax.program.scopes import attributes

# By name: each is evaluated in its own way.

# Excess precision would skip the rounding between two half operations, and so hide an overflow.
COMPILER_OPTIONS: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}

_ENDLESS = np.iinfo(np.int32).max  # iterations
Key = tuple[Any, ...]  # Comparable, because notes are pytrees. The first part is the kind of note.
Notes = dict[Key, Any]
Arrays = Sequence[Any]  # the operands or results of an equation, or the iterations of the loops around it


class Probe:
    """A hook that takes notes while a program runs; the base class takes none.

    Notes are pytrees of small arrays, by key. The notes of a loop's iterations are merged into one or, if the probe
    `stacks`, kept for each iteration.
    """

    stacks = False
    axes: Mapping[str, int] = {}  # the mesh axes of the `shard_map` around the current equation
    checked = False  # whether that `shard_map` checks which values vary along the axes
    arrays: Any = None  # a tree of arrays that it reads; a `shard_map` can't close over them on explicit axes
    most: Mapping[int, int] = {}  # the most iterations of each `while`, by its number, which a probe that stacks needs
    noted: Sequence[Key] = ()  # the keys of its notes, whose second parts are the numbers of equations

    def device(self, holding: Any = None) -> Any:
        """The index of the device, int32: its coordinates along `axes` in row-major order.

        With an array, the index of the first device that holds the same array: 0 along axes that it is equal along.
        """
        varying = compat.varying_axes(holding) if holding is not None and self.checked else self.axes
        index: Any = np.int32(0)
        for axis, size in self.axes.items():
            index = index * size + (lax.axis_index(axis) if axis in varying else 0)
        return index

    def equation(self, place: Site, iteration: Arrays, ins: Arrays, outs: Arrays, rerun: Callable[..., Any]) -> Notes:
        """Notes of an equation.

        Args:
            place: The equation.
            iteration: The number of completed iterations of each enclosing loop, outermost first.
            ins: Its operands.
            outs: Its results.
            rerun: Evaluates the equation on a list of other operands, with float32 in place of half.
        """
        return {}

    def entering(self, place: Site, ins: Sequence[Any]) -> dict[Key, Any]:
        """Notes of an equation with sub-jaxprs, before these are evaluated."""
        return {}

    def keys(self, block: Block) -> Sequence[Key]:
        """The keys of the notes that are taken in a block."""
        return [key for key in self.noted if block.start <= key[1] < block.end]

    def empty(self, key: Key) -> Any:
        """The initial value of a note."""
        raise KeyError(key)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        """Merges two notes, of which `a` is the earlier."""
        raise KeyError(key)

    def packed(self, block: Block, notes: dict[Key, Any]) -> Any:
        """The notes of one iteration of a loop's body, in the form in which they are stacked."""
        return notes

    def ended(self, place: Site, trips: Any) -> dict[Key, Any]:
        """Notes of a `while`, given its trip count."""
        return {}

    def passed(self, notes: Notes) -> None:
        """Receives the notes of a loop or branch that was compiled."""


class Instrumented:
    """Evaluates blocks with a probe.

    Args:
        probe: Takes the notes.
        wide: Whether to compute in float32 wherever the program has half, which gives its values without rounding to
            half.
        replace: Takes an equation, its iteration, its operands and its results, and returns the results to use instead.
            It is a pytree, because a `shard_map` can't close over the arrays in it on explicit axes.
    """

    def __init__(self, probe: Probe, wide: bool = False, replace: Partial | None = None):
        self.probe, self.wide, self.replace = probe, wide, replace
        self._manual: tuple[Any, ...] = ()

    def block(
        self, block: Block, arrays: Sequence[Any], iteration: Sequence[Any] = (), consts: Sequence[Any] | None = None
    ) -> tuple[list[Any], dict[Key, Any]]:
        """Evaluates a jaxpr; returns its outputs and the notes."""
        consts = [self._constant(c) for c in (block.consts if consts is None else consts)]
        notes: dict[Key, Any] = {}

        def rule(place: Site, ins: Sequence[Any]) -> Sequence[Any]:
            with compat.EquationContext(place.eqn):
                outs, new = self._evaluate(place, ins, iteration)
            self._add(notes, new)
            return outs

        env = block.environment(arrays, consts)
        return evaluate(block, env, rule, lambda literal, _: self._constant(literal.val), block.last_uses), notes

    def _add(self, notes: dict[Key, Any], new: dict[Key, Any]) -> None:
        for key, note in jax.tree.map(compat.on_current_mesh, new).items():
            notes[key] = self.probe.merge(key, notes[key], note) if key in notes else note

    def _evaluate(self, place: Site, ins: Arrays, iteration: Arrays) -> tuple[Arrays, Notes]:
        eqn = place.eqn
        if not place.blocks:
            outs = self._bound(place, ins)
            if self.replace is not None:
                outs = list(self.replace(place, iteration, ins, outs))
            return outs, self.probe.equation(place, iteration, ins, outs, functools.partial(bound, eqn, wide=True))
        notes = self.probe.entering(place, ins)
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        if place.name in special:
            outs, new = special[place.name](place, ins, iteration)
        else:
            if eqn.params.get("differentiated") and any(compat.barriers(eqn.params, len(ins))):
                ins = self._behind_barrier(ins)
            outs, new = self.block(place.blocks[0], ins, iteration)
        return outs, {**notes, **new}

    # A subclass may use a tree of arrays in place of each array. It then overrides these methods.

    def _constant(self, array: Any) -> Any:
        """The value to use for a constant of the program."""
        return widened(array) if self.wide else array

    def _decides(self, value: Any) -> Any:
        """The array that decides a branch or a loop."""
        return value

    def _with(self, probe: Probe) -> Instrumented:
        """The same evaluation with another probe."""
        return Instrumented(probe, self.wide, self.replace)

    def _behind_barrier(self, ins: Sequence[Any]) -> Sequence[Any]:
        """The operands of a remat's backward pass: without a barrier, XLA would not recompute its operations."""
        return lax.optimization_barrier(list(ins))

    def _bound(self, place: Site, ins: Sequence[Any]) -> list[Any]:
        """The results of an equation without sub-jaxprs."""
        return bound(place.eqn, ins, self.wide)

    def _empty(self, block: Block) -> dict[Key, Any]:
        return {key: self._varying(self.probe.empty(key)) for key in self.probe.keys(block)}

    def _varying(self, tree: Any) -> Any:
        """Marks notes inside a `shard_map` as varying over its devices."""
        return jax.tree.map(lambda x: compat.vary(jnp.asarray(x), self._manual), tree) if self._manual else tree

    def _after_iteration(self, body: Block, notes: Any, new: dict[Key, Any]) -> tuple[Any, Any]:
        """The merged notes after an iteration, and the notes of it to stack."""
        if self.probe.stacks:
            return notes, self.probe.packed(body, self._varying({**self._empty(body), **new}))
        self._add(notes := dict(notes), self._varying(new))
        return notes, None

    def _scan(self, place: Site, ins: Sequence[Any], iteration: Sequence[Any]) -> tuple[list[Any], dict[Key, Any]]:
        eqn, (body,) = place.eqn, place.blocks
        consts, carry, xs = body.split(ins)

        def step(state: Any, xs: Sequence[Any]) -> Any:
            i, carried, notes = state
            outs, new = self.block(body, [*consts, *carried, *xs], (*iteration, i))
            notes, stacked = self._after_iteration(body, notes, new)
            return (i + 1, outs[: len(carry)], notes), (outs[len(carry) :], stacked)

        notes = {} if self.probe.stacks else self._empty(body)
        (_, carried, notes), (ys, stacked) = scan(eqn, step, (np.int32(0), strong(carry), notes), xs)
        if self.probe.stacks and eqn.params["reverse"]:
            stacked = jax.tree.map(lambda x: x[::-1], stacked)  # in the order of execution
        return [*carried, *ys], {("iterations", place.number): stacked} if self.probe.stacks else notes

    def _while(self, place: Site, ins: Sequence[Any], iteration: Sequence[Any]) -> tuple[list[Any], dict[Key, Any]]:
        condition, body = place.blocks
        read, _, _ = condition.split(ins)
        consts, carry, _ = body.split(ins)
        plain, stacks = self._with(Probe()), self.probe.stacks

        def unfinished(carried: Sequence[Any]) -> Any:
            ((going,), _) = plain.block(condition, [*read, *carried])
            return self._decides(going)

        def step(carried: Sequence[Any], extra: Any) -> Any:
            i, notes = extra
            outs, new = self.block(body, [*consts, *carried], (*iteration, i))
            notes, stacked = self._after_iteration(body, notes, new)
            if stacks:
                notes = jax.tree.map(lambda all, one: all.at[i].set(one), notes, stacked)
            return strong(outs), (i + 1, notes)

        notes, most = self._empty(body), self.probe.most.get(place.number, _ENDLESS)
        if stacks:
            notes = jax.tree.map(lambda x: jnp.stack([x] * max(most, 1)), self.probe.packed(body, notes))
        start = np.int32(0), notes
        carried, (trips, notes) = while_loop(
            place.eqn, unfinished, step, strong(carry), start, lambda extra: extra[0] < most
        )
        # Of a condition there are none: a loop that ends by what it computes is float32 under autocast.
        notes = {("iterations", place.number): notes} if stacks else {**self._empty(condition), **notes}
        return list(carried), {**notes, **self.probe.ended(place, trips)}

    def _cond(self, place: Site, ins: Sequence[Any], iteration: Sequence[Any]) -> tuple[list[Any], dict[Key, Any]]:
        empty = {key: note for block in place.blocks for key, note in self._empty(block).items()}

        def branch(block: Block) -> Any:
            def run(*arrays: Any) -> Any:
                outs, new = self.block(block, arrays, iteration)
                return strong(outs), self._varying({**empty, **new})

            return run

        return cond(place.eqn, self._decides(ins[0]), [branch(block) for block in place.blocks], ins[1:])

    def _shard_map(self, place: Site, ins: Sequence[Any], iteration: Sequence[Any]) -> tuple[list[Any], dict[Key, Any]]:
        params, (body,) = place.eqn.params, place.blocks
        sizes = manual_axes(params)
        axes = tuple(sizes)
        inside = self._with(self.probe)
        inside._manual = axes if params["check_vma"] else ()

        def run(arrays: Sequence[Any], iteration: Sequence[Any], replace: Any, of_probe: Any) -> Any:
            inside.replace = replace
            with attributes(self.probe, {"axes": sizes, "checked": params["check_vma"], "arrays": of_probe}):
                outs, new = inside.block(body, arrays, iteration)
            return tuple(outs), jax.tree.map(lambda x: jnp.asarray(x)[None], inside._varying(new))

        in_specs = (list(params["in_specs"]), PartitionSpec(), PartitionSpec(), PartitionSpec())
        out_specs = (tuple(params["out_specs"]), PartitionSpec(axes))
        arrays, notes = shard_map(place.eqn, run, in_specs, out_specs)(
            list(ins), tuple(iteration), self.replace, self.probe.arrays
        )
        notes = jax.tree.map(compat.replicated, notes)
        devices = range(math.prod(sizes.values()))
        parts = [jax.tree.map(lambda x, i=i: x[i], notes) for i in devices]
        merged = {
            key: functools.reduce(functools.partial(self.probe.merge, key), [part[key] for part in parts])
            for key in notes
        }
        return list(arrays), merged


class Eager(Instrumented):
    """Evaluates a program outside of `jit`, operation by operation, and compiles loops, branches and `shard_map`.

    An instance compiles each of them once, for all calls with arrays of the same shapes (also in `replace`).

    Attributes:
        compiled: Those that it compiled, by number.
        known: Those of another evaluation to run instead, without `replace`.
    """

    def __init__(self, probe: Probe, wide: bool = False, replace: Partial | None = None):
        super().__init__(probe, wide, replace)
        self.compiled: dict[int, Callable[..., Any]] = {}
        self.known: Mapping[int, Callable[..., Any]] = {}

    def _evaluate(self, place: Site, ins: Arrays, iteration: Arrays) -> tuple[Arrays, Notes]:
        if not place.blocks or primitive(place.name).call:
            return super()._evaluate(place, ins, iteration)
        if place.number in self.known:
            return self.known[place.number](list(ins), list(iteration), None)
        if place.number not in self.compiled:

            def run(ins: Sequence[Any], iteration: Sequence[Any], replace: Partial | None) -> Any:
                inside = self._with(self.probe)
                inside.replace = replace
                return inside._evaluate(place, ins, iteration)

            self.compiled[place.number] = jax.jit(run, compiler_options=_compiler_options(place))
        outs, notes = self.compiled[place.number](list(ins), list(iteration), self.replace)
        self.probe.passed(notes)
        return outs, notes

    def _behind_barrier(self, ins: Sequence[Any]) -> Sequence[Any]:
        return ins  # Operations run one by one, so the compiler can't eliminate recomputation.


_SMALL = 2**14  # elements, up to which running takes less time than optimizing


def _compiler_options(place: Site) -> dict[str, bool | int | str]:
    sizes = (v.aval.size for inner in place.places() for v in inner.outvars if compat.is_shaped(v.aval))
    return COMPILER_OPTIONS | ({"xla_backend_optimization_level": 0} if max(sizes, default=0) <= _SMALL else {})


def bound(eqn: Any, arrays: Sequence[Any], wide: bool) -> list[Any]:
    """Evaluates an equation, with NumPy where that spares a compilation."""
    outs = bind_on_host(eqn, arrays, wide)
    if outs is not None:
        return outs
    if not any(isinstance(x, jax.core.Tracer) for x in arrays):
        arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]  # which some primitives insist on
    return (bind_wide if wide else bind)(eqn, arrays)


def bind_wide(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation with float32 in place of half. The arrays may have either dtype.

    A primitive of mpjax's own may have `in_float32`, its results where no value is rounded.
    """
    name = eqn.primitive.name
    if (in_float32 := getattr(eqn.primitive, "in_float32", None)) is not None:
        return [in_float32(*map(widened, arrays), **eqn.params)]
    if not any(map(is_half, (*eqn.invars, *eqn.outvars))):
        return list(map(widened, bind(eqn, arrays)))
    if name == "reduce_precision":
        return [widened(arrays[0])]
    if primitive(name).bits or primitive(name).op is Op.OPAQUE:
        return bind_as_stored(eqn, arrays)
    params = {key: _wide_parameter(value) for key, value in eqn.params.items()}
    return bind(eqn.replace(params=params), list(map(widened, arrays)))


def bind_as_stored(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation in the dtypes of the program; results in half are widened. The arrays may have either."""
    back = [
        lax.convert_element_type(x, v.aval.dtype) if is_low(v) else x for x, v in zip(arrays, eqn.invars, strict=True)
    ]
    return [widened(out) for out in bind(eqn, back)]


def _wide_parameter(value: Any) -> Any:
    """A parameter of a primitive with float32 in place of half: a dtype, or the jaxpr of a combining function."""
    if compat.is_jaxpr(value):
        return _wide_jaxpr(value)
    return np.dtype(np.float32) if isinstance(value, np.dtype) and value in HALF_DTYPES else value


@functools.lru_cache(maxsize=256)
def _wide_jaxpr(jaxpr: Any) -> Any:
    block = lay_out(jaxpr)
    dtypes = [np.dtype(np.float32) if is_half(v) else v.aval.dtype for v in block.jaxpr.invars]
    examples = [compat.example(v.aval, dtype) for v, dtype in zip(block.jaxpr.invars, dtypes, strict=True)]
    traced = jax.make_jaxpr(lambda *arrays: Instrumented(Probe(), wide=True).block(block, arrays)[0])(*examples)
    return traced if hasattr(jaxpr, "consts") else compat.open_jaxpr(traced).jaxpr
