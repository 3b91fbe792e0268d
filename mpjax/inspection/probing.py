"""Running a traced program with a probe at every equation, loops and branches and functions inside included.

The program is evaluated anew, equation by equation, under `jit`; what a probe notes of it comes out beside
the program's own results, so no tensor goes to the host. `jit`, `remat` and functions with derivative rules
are entered by evaluating what is inside them; `scan`, `while`, `cond` and `shard_map` are re-issued through
their public functions, with the probe's notes carried along. Anything else with a program inside (a Pallas
kernel, a callback) is called as it is and looked at from outside.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mpjax.casting import versions
from mpjax.casting.demand import call_jaxpr
from mpjax.casting.oplists import DEFAULTS
from mpjax.casting.transform import Program, _functional, trace
from mpjax.casting.walker import Site, site_of
from mpjax.policy import HALF_DTYPES

# Excess precision would leave out the rounding between two operations in half, and with it the overflow.
COMPILER_OPTIONS: dict[str, bool | int | str] = {"xla_allow_excess_precision": False}

_CALLS = frozenset("jit pjit closed_call call core_call remat2 checkpoint custom_jvp_call custom_vjp_call".split())
_LOOPS = frozenset({"scan", "while"})
# Not computed in another dtype than they were traced for: bits, or the dtype itself, are what they are about.
_AS_TRACED = frozenset({"bitcast_convert_type", "nextafter", "random_bits"})

Key = Hashable
# An array and the probe's shadow of it, a tree of arrays or None.
Value = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Place:
    """One equation and where it stands.

    Args:
        number: its number in the program's order, unique.
        site: the equation, its module, its source line.
        loops: the numbers of the loops around it, outermost first.
        blocks: the programs inside it, if they are entered.
        end: the number of the next equation outside it.
    """

    number: int
    site: Site
    loops: tuple[int, ...]
    blocks: tuple[Block, ...]
    end: int

    def places(self) -> Iterator[Place]:
        """This and every equation inside."""
        yield self
        for block in self.blocks:
            yield from block.places()


@dataclasses.dataclass(frozen=True)
class Block:
    """A jaxpr, its constants, and the places of its equations."""

    jaxpr: Any
    consts: Sequence[Any]
    rows: tuple[Place, ...]
    start: int
    end: int

    def places(self) -> Iterator[Place]:
        """Every equation, those inside others included, in the program's order."""
        for place in self.rows:
            yield from place.places()


def lay_out(jaxpr: Any, start: int = 0, outer: Site | None = None, loops: tuple[int, ...] = ()) -> Block:
    """Numbers the equations of a jaxpr and of those inside it."""
    opened = versions.open_jaxpr(jaxpr)
    rows, number = [], start
    for eqn in opened.jaxpr.eqns:
        site = site_of(eqn, outer)
        around = (*loops, number) if site.name in _LOOPS else loops
        blocks, end = [], number + 1
        for inner in _entered(eqn):
            blocks.append(lay_out(inner, end, site, around))
            end = blocks[-1].end
        rows.append(Place(number, site, loops, tuple(blocks), end))
        number = end
    return Block(opened.jaxpr, opened.consts, tuple(rows), start, number)


def _entered(eqn: Any) -> Sequence[Any]:
    """The programs inside an equation that are evaluated."""
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS or name == "shard_map":
        return (call_jaxpr(params),)
    if name == "scan":
        return (params["jaxpr"],)
    if name == "while":
        return (params["cond_jaxpr"], params["body_jaxpr"])
    return params["branches"] if name == "cond" else ()


class Probe:
    """What is noted while a program runs; this one notes nothing.

    A shadow goes with each value through the program: it is made by `literal` and `equation`, and None stands for
    the empty one. Notes are trees of small arrays by key, joined by `merge`.
    """

    def constant(self, number: int, array: Any) -> Any:
        """The shadow of a constant in the program; `number` is that of the equation that reads or holds it."""
        return None

    def equation(
        self, place: Place, turn: Sequence[Any], ins: Sequence[Value], outs: Sequence[Any], again: Callable[..., Any]
    ) -> tuple[Sequence[Any], dict[Key, Any]]:
        """The shadows of an equation's results, and notes.

        Args:
            place: the equation.
            turn: for each loop around it, how many turns came before.
            ins: operands with their shadows.
            outs: results.
            again: computes the results of other operands, in float32 wherever the program has half.
        """
        return [None] * len(outs), {}

    def part(self, array: Any, shadow: Any) -> Any:
        """The shadow of one turn's part of a value that a scan goes over."""
        return shadow

    def full(self, shadow: Any) -> Any:
        """A shadow as it is carried by loops, always of one structure."""
        return shadow

    def join(self, a: Any, b: Any) -> Any:
        """The shadow of a value made of two, the first of which was there first."""
        return a

    def keys(self, start: int, end: int) -> Sequence[Key]:
        """The keys of the notes that equations of these numbers make."""
        return ()

    def empty(self, key: Key) -> Any:
        """The note of nothing."""
        raise KeyError(key)

    def merge(self, key: Key, a: Any, b: Any) -> Any:
        """The note of two, the first of which was made first."""
        raise KeyError(key)


class Run:
    """Evaluates blocks with a probe.

    Args:
        probe: takes the notes.
        wide: whether to compute in float32 wherever the program has half: its values are then what the
            program would have without rounding to half.
    """

    def __init__(self, probe: Probe, wide: bool = False):
        self.probe, self.wide = probe, wide
        self._manual: tuple[Any, ...] = ()

    def block(
        self, block: Block, values: Sequence[Value], turn: Sequence[Any] = (), consts: Sequence[Value] | None = None
    ) -> tuple[list[Value], dict[Key, Any]]:
        """Evaluates a jaxpr; returns its outputs and the notes."""
        if consts is None:
            consts = [(c, self.probe.constant(block.start, c)) for c in map(self._widened, block.consts)]
        env: dict[Any, Value] = dict(
            zip((*block.jaxpr.constvars, *block.jaxpr.invars), (*consts, *values), strict=True)
        )
        notes: dict[Key, Any] = {}

        def read(v: Any, number: int) -> Value:
            if not isinstance(v, versions.Literal):
                return env[v]
            array = self._widened(v.val)
            return array, self.probe.constant(number, array)

        for place in block.rows:
            ins = [read(v, place.number) for v in place.site.eqn.invars]
            with versions.EquationContext(place.site.eqn):
                outs, new = self._evaluate(place, ins, turn)
            env.update(zip(place.site.eqn.outvars, outs, strict=True))
            self._add(notes, new)
        return [read(v, block.start) for v in block.jaxpr.outvars], notes

    def _add(self, notes: dict[Key, Any], new: dict[Key, Any]) -> None:
        for key, note in new.items():
            notes[key] = self.probe.merge(key, notes[key], note) if key in notes else note

    def _evaluate(self, place: Place, ins: Sequence[Value], turn: Sequence[Any]) -> tuple[Sequence[Value], Any]:
        eqn = place.site.eqn
        if not place.blocks:
            outs = self._bind(eqn, [array for array, _ in ins])
            shadows, notes = self.probe.equation(place, turn, ins, outs, lambda *arrays: _bind_wide(eqn, arrays))
            return list(zip(outs, shadows, strict=True)), notes
        special = {"scan": self._scan, "while": self._while, "cond": self._cond, "shard_map": self._shard_map}
        if place.site.name in special:
            return special[place.site.name](place, ins, turn)
        if eqn.params.get("differentiated") and eqn.params["prevent_cse"] and ins:
            # A remat's backward pass: without the barrier, what it computes again would be kept instead.
            arrays = lax.optimization_barrier([array for array, _ in ins])
            ins = [(array, shadow) for array, (_, shadow) in zip(arrays, ins, strict=True)]
        return self.block(place.blocks[0], ins, turn)

    def _bind(self, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
        return _bind_wide(eqn, arrays) if self.wide else _bind(eqn, arrays)

    def _widened(self, array: Any) -> Any:
        return widened(array) if self.wide else array

    def _empty(self, block: Block) -> dict[Key, Any]:
        return {key: self._varying(self.probe.empty(key)) for key in self.probe.keys(block.start, block.end)}

    def _full(self, values: Sequence[Value]) -> list[Value]:
        # Not weakly typed: a carry has one type.
        return [(_strong(array), self._varying(self.probe.full(shadow))) for array, shadow in values]

    def _varying(self, tree: Any) -> Any:
        """Notes and shadows inside a `shard_map` differ from device to device."""
        return jax.tree.map(lambda x: versions.vary(x, self._manual), tree) if self._manual else tree

    def _scan(self, place: Place, ins: Sequence[Value], turn: Sequence[Any]) -> tuple[list[Value], Any]:
        params, (body,) = place.site.eqn.params, place.blocks
        num_consts, num_carry = versions.scan_split(params)
        split = num_consts + num_carry
        consts, init, xs = ins[:num_consts], self._full(ins[num_consts:split]), ins[split:]
        num_ys = len(body.jaxpr.outvars) - num_carry
        ys_shadows = [self._varying(self.probe.full(None)) for _ in range(num_ys)]

        def step(carry: Any, arrays: Sequence[Any]) -> Any:
            i, carried, ys_shadows, notes = carry
            parts = [(a, self.probe.part(a, shadow)) for a, (_, shadow) in zip(arrays, xs, strict=True)]
            outs, new = self.block(body, [*consts, *carried, *parts], (*turn, i))
            self._add(notes := dict(notes), new)
            ys = self._full(outs[num_carry:])
            joined = [self.probe.join(old, shadow) for old, (_, shadow) in zip(ys_shadows, ys, strict=True)]
            return (i + 1, self._full(outs[:num_carry]), joined, notes), [array for array, _ in ys]

        start = (np.int32(0), init, ys_shadows, self._empty(body))
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        (_, carried, ys_shadows, notes), ys = lax.scan(step, start, [array for array, _ in xs], **options)
        return [*carried, *zip(ys, ys_shadows, strict=True)], notes

    def _while(self, place: Place, ins: Sequence[Value], turn: Sequence[Any]) -> tuple[list[Value], Any]:
        params, (condition, body) = place.site.eqn.params, place.blocks
        first = params["cond_nconsts"]
        split = first + params["body_nconsts"]
        plain = Run(Probe(), self.wide)

        def unfinished(values: Sequence[Value]) -> Any:
            (((going, _),), _) = plain.block(condition, [(array, None) for array, _ in (*ins[:first], *values)])
            return going

        def step(state: Any) -> Any:
            i, values, notes = state
            outs, new = self.block(body, [*ins[first:split], *values], (*turn, i))
            self._add(notes := dict(notes), new)
            outs = self._full(outs)
            if condition.jaxpr.outvars[0].aval.shape:
                # Under vmap each element has a condition of its own; those that are finished keep their carry.
                going = unfinished(values)
                outs = [(_select(going, new, old), s) for (new, s), (old, _) in zip(outs, values, strict=True)]
            return i + 1, outs, notes

        start = (np.int32(0), self._full(ins[split:]), self._empty(body))
        _, values, notes = lax.while_loop(lambda state: jnp.any(unfinished(state[1])), step, start)
        return list(values), notes

    def _cond(self, place: Place, ins: Sequence[Value], turn: Sequence[Any]) -> tuple[list[Value], Any]:
        empty: dict[Key, Any] = {}
        for block in place.blocks:
            empty.update(self._empty(block))

        def branch(block: Block) -> Any:
            def run(values: Sequence[Value]) -> Any:
                outs, new = self.block(block, values, turn)
                self._add(notes := dict(empty), new)
                return self._full(outs), notes

            return run

        return lax.switch(ins[0][0], [branch(block) for block in place.blocks], self._full(ins[1:]))

    def _shard_map(self, place: Place, ins: Sequence[Value], turn: Sequence[Any]) -> tuple[list[Value], Any]:
        params, (body,) = place.site.eqn.params, place.blocks
        in_specs, out_specs = versions.shard_map_specs(params)
        options = versions.shard_map_options(params)
        axes = tuple(axis for axis in options["mesh"].axis_names if axis in options["axis_names"])
        inside = Run(self.probe, self.wide)
        inside._manual = axes if options["check_vma"] else ()

        def run(arrays: Sequence[Any], shadows: Sequence[Any], turn: Sequence[Any]) -> Any:
            parts = [(a, self.probe.part(a, s)) for a, s in zip(arrays, shadows, strict=True)]
            outs, new = inside.block(body, parts, turn)
            inside._add(notes := inside._empty(body), new)
            extra = [inside._varying(self.probe.full(shadow)) for _, shadow in outs], notes
            return tuple(array for array, _ in outs), jax.tree.map(lambda x: x[None], extra)

        everywhere, by_device = PartitionSpec(), PartitionSpec(axes)
        mapped = jax.shard_map(
            run, in_specs=(list(in_specs), everywhere, everywhere), out_specs=(out_specs, by_device), **options
        )
        shadows = [self.probe.full(shadow) for _, shadow in ins]
        arrays, (shadows, notes) = mapped([array for array, _ in ins], shadows, tuple(turn))
        devices = range(int(np.prod([options["mesh"].shape[axis] for axis in axes])))
        joined = [_joined(shadow, devices, self.probe.join) for shadow in shadows]
        notes = {key: _joined(note, devices, functools.partial(self.probe.merge, key)) for key, note in notes.items()}
        return list(zip(arrays, joined, strict=True)), notes


def _joined(stacked: Any, devices: range, join: Callable[[Any, Any], Any]) -> Any:
    """One note or shadow of those of several devices."""
    first, *rest = (jax.tree.map(lambda x, i=i: x[i], stacked) for i in devices)
    for other in rest:
        first = join(first, other)
    return first


def _select(mask: Any, new: Any, old: Any) -> Any:
    return lax.select(lax.broadcast_in_dim(mask, new.shape, tuple(range(mask.ndim))), new, old)


def _strong(x: Any) -> Any:
    aval = jax.typeof(x)
    return lax.convert_element_type(x, aval.dtype) if getattr(aval, "weak_type", False) else x


def is_inexact(x: Any) -> bool:
    """Whether a value or a variable is an array of floats, real or complex."""
    aval = getattr(x, "aval", None) or jax.typeof(x)
    return versions.is_shaped(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def is_half(x: Any) -> bool:
    """Whether a value or a variable is a float16 or bfloat16 array."""
    aval = getattr(x, "aval", None) or jax.typeof(x)
    return versions.is_shaped(aval) and aval.dtype in HALF_DTYPES


def widened(x: Any) -> Any:
    """A half array in float32; anything else as it is."""
    return lax.convert_element_type(x, np.float32) if is_half(x) else x


def _bind(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    outs = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _bind_wide(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """The equation with float32 in the place of half; arrays may be of either."""
    name = eqn.primitive.name
    if not any(map(is_half, (*eqn.invars, *eqn.outvars))):
        return _bind(eqn, arrays)
    if name == "reduce_precision":
        return [widened(arrays[0])]
    if name in _AS_TRACED or name not in DEFAULTS:
        back = [
            lax.convert_element_type(x, v.aval.dtype) if is_half(v) else x
            for x, v in zip(arrays, eqn.invars, strict=True)
        ]
        return [widened(out) for out in _bind(eqn, back)]
    params = {key: np.dtype(np.float32) if _is_half_dtype(value) else value for key, value in eqn.params.items()}
    outs = eqn.primitive.bind(*map(widened, arrays), **eqn.primitive.get_bind_params(params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _is_half_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) and value in HALF_DTYPES


def traced_call(caller: str, fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
    """Traces a call that is to be run: its arguments must be arrays, not shapes."""
    call, args, kwargs, _ = _functional(fun, args, kwargs)
    program = trace(call, args, kwargs)
    for name, array in zip(program.names, program.arrays, strict=True):
        if isinstance(array, (jax.ShapeDtypeStruct, jax.core.Tracer)):
            raise TypeError(
                f"{caller}: the argument {argument_name(name)} is {array}, but the program is run to see its values: "
                f"give arrays, and call {caller} itself outside jit."
            )
    return program


def argument_name(name: str) -> str:
    """The tree path of an argument's leaf, `[0][1]['w']` of `(args, kwargs)`, as `args[1]['w']`."""
    return ("args" if name.startswith("[0]") else "kwargs") + name[3:]
