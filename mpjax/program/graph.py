"""A traced program, read once: its equations with their modules, lines and sub-jaxprs.

All tools share it, so that they count the same FLOPs, name the same source lines, and enter the same sub-jaxprs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpjax.program import compat
from mpjax.program.dataflow import once_per_jaxpr, variables
from mpjax.program.primitives import TABLE, Op, matmul_flops, primitive
from mpjax.program.source import join, module_of, path_of, phase_of, source_line, without_einsums

# By name: each holds its sub-jaxprs, and how often they run, in parameters of its own.

_T = TypeVar("_T")


class Owners(dict[int, str]):
    """The module paths of equations, by their `id`. Hashable; not changed after it is made."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def inside(self, eqn: Any) -> Owners:
        """The owners of the equations in the sub-jaxprs of an equation."""
        return Owners((id(e), self[id(e)]) for e in _nested(eqn) if id(e) in self) if self else self


NOBODY = Owners()


@dataclasses.dataclass(frozen=True)
class Site:
    """One equation and its context.

    Args:
        eqn: The equation.
        times: How often it runs (lengths of scans, grids of Pallas kernels; a `while` counts as one iteration).
        module: The named scopes around it, at all levels; Flax names modules this way.
        inside: The names of the enclosing primitives, outermost first.
        caller: The source line of the enclosing equation.
        devices: The number of devices that run it on their own shard; 1 outside of `shard_map` and `pmap`, where an
            equation operates on whole arrays.
        owners: Module paths of equations whose scopes don't name an instance (see `owners_of`).
        number: Its unique number in a `Block`, in program order.
        loops: The numbers of the enclosing loops, outermost first.
        blocks: Its sub-jaxprs, if the evaluator enters them.
        end: The number of the next equation outside it.
        axes: The mesh axes of the enclosing `shard_map`, with their sizes.
    """

    eqn: Any
    times: int
    module: str
    inside: tuple[str, ...]
    caller: str = ""
    devices: int = 1
    owners: Owners = dataclasses.field(default=NOBODY, repr=False, compare=False)
    number: int = 0
    loops: tuple[int, ...] = ()
    blocks: tuple[Block, ...] = ()
    end: int = 1
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def invars(self) -> Any:
        """The equation's operands."""
        return self.eqn.invars

    @property
    def outvars(self) -> Any:
        """The equation's results."""
        return self.eqn.outvars

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @functools.cached_property
    def source(self) -> str:
        """The user's line, as `file.py:12`; for code in a library, the line that called it."""
        return source_line(self.eqn) or self.caller

    @functools.cached_property
    def line(self) -> str:
        """The user's line also for code of a library's loop or branch, which `Rules` don't match."""
        return source_line(self.eqn, self.caller)

    @property
    def label(self) -> str:
        """The primitive and its source line, as `exp at file.py:12`."""
        return f"{compat.name_of(self.eqn)} at {self.source or 'an unknown line'}"

    @property
    def flops(self) -> int:
        """FLOPs of a matmul or convolution, summed over all iterations; 0 for any other operation."""
        return self.times * matmul_flops(self.eqn)

    @functools.cached_property
    def path(self) -> str:
        """The module path without the marks of transformations: the same in the forward and backward pass."""
        return paths_of(self.eqn, self.module, self.owners)[0]

    @property
    def phase(self) -> str:
        """`FORWARD`, `BACKWARD`, or `RECOMPUTED` for a forward operation recomputed in the backward pass."""
        return phase_of(self.module)

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop, which runs its sub-jaxprs repeatedly."""
        return primitive(self.name).loop

    def results(
        self,
        given: Sequence[_T],
        run: Callable[[Any, Sequence[_T]], list[_T]],
        join: Callable[[_T, _T], _T],
        blocks: Sequence[Any] = (),
        iterations: int = 2,
    ) -> list[_T]:
        """The facts of its results, for an equation with sub-jaxprs.

        Args:
            given: The facts of its operands.
            run: The facts of a block's outputs, given those of its inputs.
            join: The facts of a value that is one of two: of two branches, or before and after an iteration.
            blocks: Its sub-jaxprs in another form, each with `split`; its `blocks` if empty.
            iterations: The most iterations of a loop that are read, until nothing changes. A value may pass from one
                carried value to the next in each.
        """
        blocks = blocks or self.blocks
        if not self.is_loop:
            branches = [run(block, block.split(given)[0]) for block in blocks]
            return [functools.reduce(join, outs) for outs in zip(*branches, strict=True)]
        body, outs = blocks[-1], list[_T]()
        consts, carry, xs = body.split(given)
        for _ in range(iterations):  # results of an iteration are operands of the next
            outs, before = run(body, [*consts, *carry, *xs]), carry
            carry = [join(old, new) for old, new in zip(before, outs, strict=False)]
            if carry == before:
                break
        return [*carry, *outs[len(carry) :]]

    def places(self) -> Iterator[Site]:
        """Yields this equation and every equation inside it."""
        yield self
        for block in self.blocks:
            yield from block.places()


def _nested(eqn: Any) -> Iterator[Any]:
    for inner in sub_jaxprs(eqn):
        for other in inner.opened.eqns:
            yield other
            yield from _nested(other)


# Equinox names the classes of its layers, not the instances.
_CLASSES = "eqx.nn."


def paths_of(eqn: Any, module: str, owners: Owners = NOBODY) -> tuple[str, ...]:
    """The module paths of an equation, the most specific first. Reports show the first; a rule may match any of them.

    Args:
        eqn: The equation.
        module: The named scopes around it, at all levels.
        owners: Module paths of equations whose scopes don't name an instance.
    """
    written = path_of(module)
    path = without_einsums(written)
    owner = owners.get(id(eqn)) if owners and (not path or path.startswith(_CLASSES)) else None
    return tuple(dict.fromkeys((path if owner is None else owner, path, written)))


def site_of(eqn: Any, around: Site | None = None, owners: Owners = NOBODY) -> Site:
    """The site of an equation, at the top level or in a sub-jaxpr of the equation of `around`."""
    if around is None:
        return Site(eqn, 1, module_of(eqn), (), owners=owners)
    module, inside = join(around.module, module_of(eqn)), (*around.inside, around.name)
    devices = around.devices * replicas(around.eqn)
    return Site(eqn, trip_count(around.eqn, around.times), module, inside, around.line, devices, around.owners)


class SubJaxpr(NamedTuple):
    """A jaxpr that an equation runs, and the operands of the equation that it reads.

    Args:
        jaxpr: The jaxpr, open or closed.
        operands: The operand that each input takes; None for an input that the primitive makes itself, such as the
            vector of a solve or the reference of a kernel.
        consts: The number of leading inputs that are the same in all of its runs.
        carry: The number of inputs after those that the outputs of the previous run replace.
    """

    jaxpr: Any
    operands: Sequence[int | None]
    consts: int
    carry: int = 0

    @property
    def opened(self) -> Any:
        """The open jaxpr."""
        return compat.open_jaxpr(self.jaxpr).jaxpr

    def split(self, operands: Sequence[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """The equation's operands as those that all runs share, the first carry, and those that are iterated over."""
        arrays = [operands[i] for i in self.operands if i is not None]
        end = self.consts + self.carry
        return arrays[: self.consts], arrays[self.consts : end], arrays[end:]


def sub_jaxprs(eqn: Any) -> Sequence[SubJaxpr]:
    """The sub-jaxprs that an equation runs, excluding the scalar function that combines the updates of a scatter."""
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.invars)
    row, every = primitive(name), range(count)
    if row.op not in (Op.ENTER, Op.OPAQUE):
        return ()
    match name:
        case "scan":
            return (SubJaxpr(params["jaxpr"], every, *compat.scan_split(params)),)
        case "while":
            first, second = params["cond_nconsts"], params["body_nconsts"]
            carry = every[first + second :]
            condition = SubJaxpr(params["cond_jaxpr"], (*every[:first], *carry), first, len(carry))
            return condition, SubJaxpr(params["body_jaxpr"], every[first:], second, len(carry))
        case "cond":
            return [SubJaxpr(branch, every[1:], count - 1) for branch in params["branches"]]
        case "custom_linear_solve":
            ends = itertools.accumulate(params["const_lengths"])
            consts = [every[end - n : end] for end, n in zip(ends, params["const_lengths"], strict=True)]
            solve = zip(params["jaxprs"], consts, strict=True)
            return [_padded(jaxpr, operands) for jaxpr, operands in solve if jaxpr is not None]
    inner = _jaxprs_in(eqn)
    if row.call or row.shards:
        return [SubJaxpr(jaxpr, every, count) for jaxpr in inner[:1]]
    return [_padded(jaxpr, ()) for jaxpr in inner]


def operands_read(eqn: Any) -> Sequence[bool]:
    """For each operand of an equation, whether the compiled program reads it; others are for derivatives alone."""
    row, count = primitive(eqn.primitive.name), len(eqn.invars)
    if row.identity:
        return [i == 0 for i in range(count)]
    if row.unread:
        return [i > 0 for i in range(count)]
    inner = sub_jaxprs(eqn)
    passed = {i for sub in inner for i in sub.operands}
    read = {i for sub in inner for i, used in zip(sub.operands, inputs_read(sub.opened), strict=True) if used}
    return [i in read or i not in passed for i in range(count)]


@once_per_jaxpr
def inputs_read(jaxpr: Any) -> tuple[bool, ...]:
    """The same for each input of an open jaxpr."""
    read = [v for eqn in jaxpr.eqns for v, used in zip(eqn.invars, operands_read(eqn), strict=True) if used]
    found = {*variables((*read, *jaxpr.outvars))}
    return tuple(v in found for v in jaxpr.invars)


def replaced(jaxpr: Any, equation: Callable[[Any], Any], known: MutableMapping[Any, Any]) -> Any:
    """An open jaxpr with other equations at any depth; the same one if they are all the same.

    Args:
        jaxpr: The open jaxpr.
        equation: Returns the equation in place of a given one.
        known: The jaxprs that were replaced before, each with its replacement: one that is shared stays shared.
    """
    if jaxpr not in known:
        eqns = [_with_sub_jaxprs_replaced(equation(eqn), equation, known) for eqn in jaxpr.eqns]
        same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        known[jaxpr] = None if same else jaxpr.replace(eqns=eqns)
    return jaxpr if known[jaxpr] is None else known[jaxpr]


def _with_sub_jaxprs_replaced(eqn: Any, equation: Callable[[Any], Any], known: MutableMapping[Any, Any]) -> Any:
    for inner in sub_jaxprs(eqn):
        with compat.on_its_devices(eqn.params) if eqn.primitive.name == "shard_map" else contextlib.nullcontext():
            new = replaced(inner.opened, equation, known)
        eqn = eqn if new is inner.opened else compat.with_sub_jaxpr(eqn, inner.opened, new)
    return eqn


# JAX moves `checkpoint`, `custom_jvp`, `custom_vjp` and others to one primitive, `call_hi_primitive`, whose equation
# holds an object with the rules. In a program that mpjax reads, such an equation is replaced by one of the present
# primitive, so that everything that enters that one enters it too. (`compat.present_primitives` avoids most of them.)


def present(jaxpr: Any) -> Any:
    """A closed jaxpr in which JAX's own hi primitives are replaced at any depth; the same one if it has none.

    Calls of one activation with a derivative rule, such as the ReLU of each layer, share the rule, which JAX makes for
    each call.
    """
    old = compat.open_jaxpr(jaxpr).jaxpr
    new = present_open(old)
    return jaxpr if new is old else compat.closed_like(jaxpr, new)


def present_open(jaxpr: Any) -> Any:
    """The same of an open jaxpr."""
    rules: dict[Any, dict[str, Any]] = {}

    def equation(eqn: Any) -> Any:
        if eqn.primitive.name == "custom_jvp_call":
            shared = _with_shared_rule(eqn, rules)
            return eqn if shared is eqn.params else eqn.replace(params=shared)
        call = compat.present_call(eqn) if eqn.primitive.name == "call_hi_primitive" else None
        return eqn if call is None else compat.equation_of(call, eqn)

    return replaced(jaxpr, equation, {})


def _with_shared_rule(eqn: Any, rules: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """The parameters of a call of a function with a derivative rule, those of an earlier call if both do the same.

    Activations alone, of one operand: equations that several calls share have no module of their own.
    """
    params, (jaxpr, consts) = eqn.params, compat.open_jaxpr(eqn.params["call_jaxpr"])
    rule = compat.jvp_function(params)
    if rule is None or consts or len(eqn.invars) != 1:
        return params
    try:
        return rules.setdefault(
            (rule, params["symbolic_zeros"], form_of(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)), params
        )
    except TypeError:  # a static argument or a parameter without a hash
        return params


def form_of(eqns: Iterable[Any], ins: Iterable[Any], outs: Iterable[Any], scopes: int = 0) -> Any:
    """A key that equations with the same computation, in the same lines and scopes, share.

    Args:
        eqns: The equations.
        ins, outs: Their inputs and results.
        scopes: The number of outermost named scopes that make no difference.
    """
    numbers: dict[Any, int] = {}

    def number(v: Any) -> Any:
        if not isinstance(v, compat.Literal):
            return numbers.setdefault(v, len(numbers)), v.aval
        value = np.asarray(v.val)
        return v.aval, value.tobytes() if value.dtype != object else id(v)

    def form(eqn: Any) -> Any:
        read, made, info = tuple(map(number, eqn.invars)), tuple(map(number, eqn.outvars)), eqn.source_info
        lines = info.name_stack.stack[scopes:], info.traceback
        return eqn.primitive, tuple(eqn.params.items()), eqn.ctx, read, made, lines

    return tuple(map(number, ins)), tuple(map(form, eqns)), tuple(map(number, outs))


def _padded(jaxpr: Any, operands: Sequence[int]) -> SubJaxpr:
    """A sub-jaxpr whose inputs after these operands are not operands."""
    others = len(compat.open_jaxpr(jaxpr).jaxpr.invars) - len(operands)
    return SubJaxpr(jaxpr, (*operands, *[None] * others), len(operands))


def _jaxprs_in(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    values = (part for x in eqn.params.values() for part in (x if isinstance(x, (tuple, list)) else (x,)))
    return [value for value in values if compat.is_jaxpr(value)]


def hidden(eqn: Any) -> str:
    """The reason why a program does not show the work of an equation; empty if it does."""
    if primitive(eqn.primitive.name).foreign:
        return "code outside of JAX"
    return "a primitive that mpjax does not know" if is_unknown(eqn) else ""


def is_unknown(eqn: Any) -> bool:
    """Whether the primitive of an equation is not JAX's own, and shows no jaxpr of what it computes."""
    return eqn.primitive.name not in TABLE and bool(eqn.outvars) and not sub_jaxprs(eqn)


def may_hold_matmuls(eqn: Any) -> bool:
    """Whether the work of an equation is hidden, and may contain matmuls of float32 matrices.

    Not counted is Python code that runs on the host.
    """
    if not hidden(eqn) or primitive(eqn.primitive.name).host or not any(map(_is_matrix, eqn.invars)):
        return False
    return any(compat.is_inexact(v.aval) for v in eqn.outvars) and not (is_unknown(eqn) and unknown_flops(eqn) == 0)


def _is_matrix(v: Any) -> bool:
    return compat.is_shaped(v.aval) and v.aval.dtype == np.float32 and v.aval.ndim > 1


_SPARSE = ("bcoo_dot_general", "bcsr_dot_general")


def unknown_flops(eqn: Any) -> int | None:
    """FLOPs of the matmuls inside a primitive that mpjax does not know; None if JAX can't trace its implementation."""
    params = eqn.params
    if eqn.primitive.name in _SPARSE:
        (_, contracted), (_, batch) = params["dimension_numbers"]
        shape = eqn.invars[-1].aval.shape
        columns = math.prod(n for d, n in enumerate(shape) if d not in (*contracted, *batch))
        return 2 * compat.numel(eqn.invars[0].aval) * columns

    def implementation(*arrays: Any) -> Any:
        rest = iter(arrays)
        # Equinox's `noinline` finds its function by a constant.
        operands = [v.val if isinstance(v, compat.Literal) else next(rest) for v in eqn.invars]
        return eqn.primitive.impl(*operands, **params)

    try:
        implemented = compat.trace(implementation, *(v.aval for v in variables(eqn.invars)))
    except Exception:  # An implementation may be any code, or be missing.
        return None
    return sum(site.flops for site in walk(implemented))


def walk(jaxpr: Any, around: Site | None = None, owners: Owners = NOBODY) -> Iterator[Site]:
    """Yields every equation of an open or closed jaxpr and of its sub-jaxprs, in program order."""
    for eqn in compat.open_jaxpr(jaxpr).jaxpr.eqns:
        site = site_of(eqn, around, owners)
        yield site
        for inner in sub_jaxprs(eqn):
            yield from walk(inner.jaxpr, site)


def replicas(eqn: Any) -> int:
    """The number of devices that run the sub-jaxpr of an equation, each on its own shard."""
    if eqn.primitive.name == "shard_map":
        return math.prod(manual_axes(eqn.params).values())
    return int(eqn.params["axis_size"]) if eqn.primitive.name == "xla_pmap" else 1


def trip_count(eqn: Any, times: int) -> int:
    """How often the sub-jaxprs of an equation run, if the equation itself runs `times` times."""
    if eqn.primitive.name == "scan":
        return times * eqn.params["length"]
    if eqn.primitive.name == "pallas_call":
        return times * math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    return times


@dataclasses.dataclass(frozen=True)
class Block:
    """A jaxpr, its constants, and the sites of its equations; in an equation, how it reads the operands."""

    jaxpr: Any
    consts: Sequence[Any]
    eqns: tuple[Site, ...]
    start: int
    end: int
    split: Callable[[Sequence[Any]], tuple[list[Any], list[Any], list[Any]]] = lambda operands: ([*operands], [], [])

    @property
    def outvars(self) -> Any:
        """The jaxpr's outputs."""
        return self.jaxpr.outvars

    def environment(self, ins: Sequence[Any], consts: Sequence[Any]) -> dict[Any, Any]:
        """The values of the inputs and constants, by variable."""
        return dict(zip((*self.jaxpr.constvars, *self.jaxpr.invars), (*consts, *ins), strict=True))

    @functools.cached_property
    def last_uses(self) -> list[list[Any]]:
        """For each equation, the variables that no later equation reads and the block does not return."""
        live = {*variables(self.jaxpr.outvars)}
        dead: list[list[Any]] = []
        for site in reversed(self.eqns):
            used = {*variables((*site.invars, *site.outvars))}
            dead.append([v for v in used if v not in live])
            live |= used
        return dead[::-1]

    def places(self) -> Iterator[Site]:
        """Yields every equation, including nested ones, in program order."""
        for site in self.eqns:
            yield from site.places()

    def not_entered(self) -> tuple[str, ...]:
        """The operations that an evaluation of the block does not see inside of (see `not_entered`)."""
        return not_entered(self.places(), evaluated=True)


def lay_out(
    jaxpr: Any,
    start: int = 0,
    outer: Site | None = None,
    loops: tuple[int, ...] = (),
    axes: tuple[tuple[str, int], ...] = (),
    owners: Owners = NOBODY,
) -> Block:
    """Numbers the equations of a jaxpr and of its sub-jaxprs; `owners` as in `owners_of`."""
    opened = compat.open_jaxpr(jaxpr)
    sites, number = [], start
    for eqn in opened.jaxpr.eqns:
        site = site_of(eqn, outer, owners)
        around = (*loops, number) if site.is_loop else loops
        blocks, end = [], number + 1
        for inner in sub_jaxprs(eqn) if is_entered(eqn) else ():
            devices = tuple(manual_axes(eqn.params).items()) if primitive(site.name).shards else axes
            blocks.append(dataclasses.replace(lay_out(inner.jaxpr, end, site, around, devices), split=inner.split))
            end = blocks[-1].end
        sites.append(dataclasses.replace(site, number=number, loops=loops, blocks=tuple(blocks), end=end, axes=axes))
        number = end
    return Block(opened.jaxpr, opened.consts, tuple(sites), start, number)


def manual_axes(params: dict[str, Any]) -> dict[str, int]:
    """The mesh axes that a `shard_map` maps over, with their sizes."""
    options = compat.shard_map_options(params)
    return {axis: options["mesh"].shape[axis] for axis in options["mesh"].axis_names if axis in options["axis_names"]}


def is_entered(eqn: Any) -> bool:
    """Whether the evaluator runs the sub-jaxprs of an equation, operation by operation."""
    row = primitive(eqn.primitive.name)
    return row.call or row.op is Op.ENTER


def not_entered(sites: Iterable[Site], evaluated: bool = False) -> tuple[str, ...]:
    """The operations of a program whose work a tool does not see, with their lines and the reason.

    Args:
        sites: The equations, with those of the sub-jaxprs that the tool enters.
        evaluated: Whether the tool evaluates them, so that it sees only the results of a kernel or a solve.
    """
    reasons = ((site.label, hidden(site.eqn) or (evaluated and _as_a_whole(site.eqn))) for site in sites)
    return tuple(dict.fromkeys(f"{place}: {why}" for place, why in reasons if why))


def _as_a_whole(eqn: Any) -> str:
    return "runs as a whole" if sub_jaxprs(eqn) and not is_entered(eqn) else ""
