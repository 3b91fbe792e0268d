"""Rematerialisation regions: cheap arithmetic that the backward pass recomputes instead of storing.

A normalisation, a softmax, a GELU or a loss reads half activations and stores several float32 values per element for
its derivative. A region is issued under `jax.checkpoint`, so only its half inputs are stored. Only cheap work is
recomputed: elementwise operations and reductions, but no matmul, loop, sort, random number or collective.

A region contains the float32 arithmetic between two matmuls, and as much of the half arithmetic around it as minimises
the stored bytes; or half arithmetic alone, where that would store more than it reads. For example, a region that
includes a bias addition stores the matmul's result. What depends on no float, such as a mask, is computed in the region
that first reads it, so that no region stores it.

Half arithmetic in a region is rounded where a result leaves the region, and nowhere before (`rounding`). So is a chain
of offsets and factors outside of regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from mpjax.casting.lattice import FULL, HALF, TRACED, Inferred, Level, Storage, castable
from mpjax.casting.plan import Action, Step
from mpjax.casting.recompute import inside_of_call, is_cheap
from mpjax.casting.rounding import adds, is_arithmetic, is_folded, is_move, is_rounding, reads_wide, without_rounding
from mpjax.casting.setting import tracked
from mpjax.casting.uses import STREAM_ADDITION, Use
from mpjax.program import compat
from mpjax.program.dataflow import variables
from mpjax.program.graph import form_of
from mpjax.program.primitives import MATMULS, Op, Saves, primitive

# The most steps by which a region may extend before and after its float32 arithmetic. Bounds the planning time.
_REACH = 32

# A value and the dtype in which it is read.
Read = tuple[Any, Storage]
_ITEMSIZE = {HALF: 2, Storage.MASK: 1}


@dataclasses.dataclass(slots=True)
class RematRegion:
    """Steps that are issued together under `jax.checkpoint`.

    Args:
        eqns: The steps.
        ins: The values that they read from outside the region, with storage dtypes.
        is_input: For each of `ins`, whether it is an unchanged input of the program, such as a parameter.
        outs: Their results that are read outside the region, with storage dtypes.
        scopes: The named scopes that all steps share.
        is_last: Whether no operation in half depends on its results. It ends a loss, and its backward pass follows at
            once.
        model: The first region of the plan with the same computation, for example in an earlier layer; possibly this
            region. Regions share the function of their model, so that JAX differentiates and transposes it once.
        body: The function of a model.
        remembering: The same as a function whose derivative reads packed inputs.
        packs: Those of `ins` that are kept in fewer bits, by index, each with the format: half arrays in eight bits,
            gated states in eight bits or in half.
        recomputed: Those of its results that are not kept for a matmul in eight bits, because they follow from `ins`.
    """

    eqns: list[Step]
    ins: tuple[Read, ...]
    is_input: tuple[bool, ...]
    outs: tuple[Read, ...]
    scopes: Any
    is_last: bool = False
    model: RematRegion | None = None
    body: Callable[..., Any] | None = None
    packs: dict[int, str] = dataclasses.field(default_factory=dict)
    recomputed: frozenset[Any] = frozenset()
    remembering: Callable[..., Any] | None = None

    @property
    def invars(self) -> Sequence[Any]:
        """The variables of `ins`."""
        return [v for v, _ in self.ins]

    @property
    def outvars(self) -> Sequence[Any]:
        """The variables of `outs`. A result that is read in both dtypes occurs twice there."""
        return list(dict.fromkeys(v for v, _ in self.outs))


def _saved(eqn: Any) -> Iterator[Any]:
    """The values that the derivative of an equation saves, approximately."""
    row = primitive(eqn.primitive.name)
    if row.call:
        for inner in inside_of_call(eqn):
            yield from _saved(inner)
    elif row.backward.saves is not Saves.NOTHING and any(map(tracked, eqn.outvars)):
        if row.scales and any(isinstance(v, compat.Literal) for v in eqn.invars):
            return
        yield from variables(eqn.invars) if row.backward.saves is Saves.INPUTS else eqn.outvars


def saved_by(step: Step) -> Sequence[Read]:
    """The values that the derivative of a step saves, with storage dtypes."""
    if step.action is Action.ENTER:
        if primitive(step.eqn.primitive.name).rule:  # a mask, as for relu
            return [(v, Storage.MASK) for v in step.eqn.outvars]
        return [read for plan in step.plans for inner in plan.eqns for read in saved_by(inner)]
    if step.action is not Action.BIND:
        return []
    return [(v, HALF if step.half else FULL) for v in _saved(step.eqn) if tracked(v)]


def _is_choice(step: Step) -> bool:
    """Whether each element of a step's result is one of an operand's, or of its size."""
    row = primitive(step.eqn.primitive.name)
    return row.keeps_values or row.exact


def with_regions(
    steps: Sequence[Step],
    values: Mapping[Any, Inferred],
    uses: Mapping[Any, Use],
    results: Sequence[Read],
    recompute: bool = True,
    packs: bool = False,
    rounds: bool = False,
) -> list[Any]:
    """Groups steps into regions and keeps the others, in order.

    Args:
        steps: The steps of a plan.
        values: The inferred dtypes of its values.
        uses: The uses of its values.
        results: The outputs of the plan, with the storage dtypes in which they are read.
        recompute: Whether there are regions: not in a checkpoint, which recomputes anyway.
        packs: Whether half inputs of regions are kept in eight bits.
        rounds: Whether half arithmetic rounds each of its results, those that stay in a region too.
    """
    stretches = _Stretches(steps, values, uses, results, recompute, packs, rounds)
    formed: list[Any] = []
    run: list[Step] = []
    outputs: set[Any] = set()
    waiting: dict[Any, list[Step]] = {}  # the results of parts that wait for their first reader, such as a mask

    def close(read: Iterable[Any]) -> None:
        """Ends the current run of steps, because its results are read."""
        read = set(read)
        for part in _connected(run):
            results = [v for step in part for v in step.eqn.outvars]
            if read.isdisjoint(results) and _reads_no_float(part):
                waiting.update((v, part) for v in results)
            else:
                formed.extend(stretches.divided(part))
        run.clear()
        outputs.clear()

    def resume(read: Iterable[Any], joins: bool) -> None:
        """Issues the waiting parts whose results are read. The reader joins the current run, or takes no part in it."""
        for v in read:
            part = waiting.get(v, ())
            results = [v for step in part for v in step.eqn.outvars]
            for result in results:
                del waiting[result]
            if joins:
                run.extend(part)
                outputs.update(results)
            else:
                formed.extend(stretches.divided(part))

    for step in steps:
        read = [v for v, _ in step.all_reads]
        belongs = _belongs(step)
        resume(read if waiting else (), belongs)
        if belongs:
            run.append(step)
            outputs.update(step.eqn.outvars)
        elif run and not step.eqn.effects and (moves := _moves_of_inputs(run, read)) is not None:
            # It reads no other result of the run, so it may go first. It is the matmul of another branch.
            formed.extend(moves)
            formed.append(step)
            run[:] = [each for each in run if each not in moves]
            outputs.difference_update(v for each in moves for v in each.outvars)
        else:
            close(read)
            formed.append(step)
    close(outputs)
    resume(list(waiting), False)
    return formed


def _moves_of_inputs(run: Sequence[Step], read: Iterable[Any]) -> list[Step] | None:
    """The steps of a run that make what is read, if all move inputs of the program, as `w.T` does; None if not."""
    needed, moves = set(read), []
    for step in reversed(run):
        if not needed.isdisjoint(step.outvars):
            if step.listing.op is not Op.MOVE or any(x is not None and x.level != Level.INPUT for x in step.outs):
                return None
            needed.update(v for v, _ in step.all_reads)
            moves.append(step)
    return moves[::-1]


def _connected(run: Sequence[Step]) -> Iterable[list[Step]]:
    """The independent parts of a run, such as two branches. Each keeps its order."""
    joined = list(range(len(run)))  # maps each step to an earlier one of its part, or to itself
    maker: dict[Any, int] = {}

    def first(i: int) -> int:
        while joined[i] != i:
            joined[i] = i = joined[joined[i]]
        return i

    for i, step in enumerate(run):
        for v, _ in step.all_reads:
            if v in maker:
                a, b = first(i), first(maker[v])
                joined[max(a, b)] = min(a, b)
        maker.update((v, i) for v in step.eqn.outvars)
    parts: dict[int, list[Step]] = {}
    for i, step in enumerate(run):
        parts.setdefault(first(i), []).append(step)
    return parts.values()


def _reads_no_float(part: Sequence[Step]) -> bool:
    """Whether connected steps depend only on constants and integers, as the steps that make a mask do."""
    inside = {v for step in part for v in step.eqn.outvars}
    return not any(compat.is_inexact(v.aval) for step in part for v, _ in step.all_reads if v not in inside)


def _belongs(step: Step) -> bool:
    if step.action is Action.ENTER:
        return is_folded(step)
    # A sum of the residual stream reads float32, and not the half copies that a region would keep.
    return step.listing.op is not Op.OPAQUE and step.listing is not STREAM_ADDITION and is_cheap(step.eqn)


class _Stretches:
    """Finds the regions in a plan's runs of cheap steps. Holds the readers and sizes of the plan's values."""

    def __init__(
        self,
        steps: Sequence[Step],
        values: Mapping[Any, Inferred],
        uses: Mapping[Any, Use],
        results: Sequence[Read],
        recompute: bool,
        packs: bool,
        rounds: bool,
    ):
        self.values, self.uses, self.recompute, self.packs, self.rounds = values, uses, recompute, packs, rounds
        self.models: dict[Any, RematRegion] = {}
        self._sizes: dict[Read, int] = {}
        self.readers: dict[Read, list[int]] = {}
        self.stored: set[Read] = set()  # by a matmul, whatever the regions
        # The shapes of what the program returns in float32, as a loop does its next state.
        self.returned = {v: v.aval.shape for v, storage in results if storage == FULL and compat.is_shaped(v.aval)}
        for step in steps:
            for read in step.all_reads:
                self.readers.setdefault(read, []).append(id(step))
                if step.eqn.primitive.name in MATMULS:
                    self.stored.add(read)
        for read in results:
            self.readers.setdefault(read, []).append(0)

    def divided(self, run: Sequence[Step]) -> list[Any]:
        """A run of cheap steps, with a region in it if one saves memory."""
        saved = [list(saved_by(step)) for step in run]
        # Half arithmetic has a region of its own where float32 arithmetic has none, or where what it reads is packed.
        choices = ((FULL, HALF),) if self.packs else ((FULL,), (FULL, HALF))
        for worth in choices if self.recompute else ():
            wide = [i for i, reads in enumerate(saved) if any(read[1] in worth and self.size(read) for read in reads)]
            if wide and (found := self._divided(run, saved, wide[0], wide[-1])):
                return found
        return self._sums(run)

    def _sums(self, run: Sequence[Step]) -> list[Step]:
        """A run without a region, in which arithmetic rounds no value that only more arithmetic of the run reads.

        What no derivative saves stays in the registers of a kernel too: `h + mean - other_mean` is rounded once.
        """
        if self.rounds:
            return list(run)
        # A checkpoint keeps nothing, and its backward pass a mask or signs, of a maximum, bounds or an absolute value.
        saving = [step for step in run if self.recompute or not _is_choice(step)]
        saved = {v for step in saving for v, storage in saved_by(step) if storage != Storage.MASK}
        unrounded: set[Any] = set()
        able: set[int] = set()  # to read unrounded values
        for step in reversed(run):
            goes_on = all(self._readers(v) <= able for v in step.outvars)  # What is not read does no harm.
            # In a checkpoint, the sum of a stream is written, in half, for its several readers.
            one_reader = all(len(self._readers(v)) == 1 for v in step.outvars)
            goes_on &= self.recompute or not adds(step) or self._reads_one(step) or one_reader
            if is_rounding(step) and goes_on:
                unrounded.update(v for v in step.outvars if v not in saved)
            # What is rounded before the call or move that ends a chain is as exact, if it does not add. The sum of two
            # activations that ends one, as in a residual stream, takes longer in float32: it is no part of a matmul.
            ends = not is_move(step) and (adds(step) or step.action is Action.BIND) and self._reads_one(step)
            if (is_arithmetic(step) and (goes_on or ends)) or reads_wide(step):
                able.add(id(step))
        return without_rounding(run, unrounded, ends_round=True)

    def _reads_one(self, step: Step) -> bool:
        return len(self._activations(step)) == 1

    def _activations(self, step: Step) -> Set[Any]:
        """The values that a step reads and that do not follow from parameters and inputs alone."""
        return {v for v in variables(step.eqn.invars) if v in self.values and not castable(self.values[v])}

    def _divided(self, run: Sequence[Step], saved: Sequence[list[Read]], least: int, most: int) -> list[Any] | None:
        """A run with a region that contains the steps from `least` to `most`; None if it saves no memory."""
        results = self._results(run)
        # The best start depends on the end, because a step after the region may need a step before it.
        first, last = least, most
        for _ in range(2):
            before = last
            first = self._best_start(run, saved, least, last)
            last = self._best_end(run, saved, results, first, most)
            if last == before:
                break
        chain = self._end_of_chain(run, most)
        end = max(chain, self._end_of_chain(run, last))
        window = Window(self, run, saved, first, end)
        outs = _outs(results, first, end)
        updated = {self.returned[v] for v, _ in outs if v in self.returned}
        ins = tuple((v, FULL if self._is_copied(v, updated) else storage) for v, storage in window.ins.items())
        without = sum(map(self._size_unpacked, {read for reads in saved for read in reads}))
        if not outs or without < window.bytes + (chain == most):  # As many bytes pay if a chain is rounded once.
            return None
        inside = list(run[first : end + 1])
        if not self.rounds:
            inside = without_rounding(inside, {v for step in inside for v in variables(step.eqn.invars)})
        scopes = compat.common_scopes([step.eqn for step in inside])
        is_last = not any(self.uses.get(v, Use.NONE) & Use.ANY_HALF for v, _ in outs)
        region = RematRegion(inside, ins, tuple(self.is_input_value(v) for v, _ in ins), outs, scopes, is_last)
        try:
            region.model = self.models.setdefault(_signature(region), region)
        except TypeError:  # a parameter without a hash
            region.model = region
        return [*self._sums(run[:first]), region, *self._sums(run[end + 1 :])]

    def _is_copied(self, v: Any, shapes: Set[tuple[int, ...]]) -> bool:
        """Whether a value of one of the shapes has a half copy: the next state must not follow from that.

        The shape decides, so that a returned norm of a stream keeps float32 too, which costs memory alone.
        """
        return v in self.values and self.values[v].copied and v.aval.shape in shapes

    def _end_of_chain(self, run: Sequence[Step], last: int) -> int:
        """The end of a region, after offsets and factors of its last result that nothing else reads."""
        read = [v for v in run[last].outvars if self._readers(v)]
        end = read[0] if len(read) == 1 else None
        for i, step in enumerate(run[last + 1 :], last + 1):
            if end in self._activations(step):
                if not (is_arithmetic(step) and self._readers(end) == {id(step)} and len(step.outvars) == 1):
                    break
                end = step.outvars[0]
                last = i if adds(step) else last
        return last

    def _readers(self, v: Any) -> Set[int]:
        return {*self.readers.get((v, HALF), ()), *self.readers.get((v, FULL), ())}

    def _best_start(self, run: Sequence[Step], saved: Sequence[list[Read]], first: int, last: int) -> int:
        """The start that minimises the stored bytes of a region that ends at `last`.

        Of equals, one that the backward pass reads least for: the sum of a residual stream in place of what it adds, of
        which something else stores one. Of these, the earliest.
        """
        window = Window(self, run, saved, first, last)
        costs = {first: (window.bytes, window.bytes_read)}
        for i in range(first - 1, max(first - _REACH, 0) - 1, -1):
            window.extend_before(run[i], saved[i])
            costs[i] = window.bytes, window.bytes_read
        return min(costs, key=lambda i: (costs[i], i))

    def _best_end(
        self, run: Sequence[Step], saved: Sequence[list[Read]], results: Sequence[_Result], first: int, last: int
    ) -> int:
        """The end that minimises the stored bytes of a region that starts at `first`; of equals, the smallest outputs.

        Outputs have cotangents, which the backward pass holds when it enters the region, so half outputs are better.
        """
        window = Window(self, run, saved, first, last)
        costs = {last: window.bytes}
        for i in range(last + 1, min(last + _REACH, len(run))):
            window.extend_after(run[i], saved[i])
            costs[i] = window.bytes
        fewest = min(costs.values())
        least = [i for i, cost in costs.items() if cost == fewest]
        if len(least) == 1:
            return least[0]
        return min(least, key=lambda i: (sum(map(_bytes, _outs(results, first, i))), i))

    def is_input_value(self, v: Any) -> bool:
        """Whether a value is an unchanged input of the program, which is in memory anyway."""
        return v in self.values and self.values[v].level == Level.INPUT

    def size(self, read: Read) -> int:
        """The bytes that storing a value adds; 0 if it is stored anyway."""
        if read not in self._sizes:
            size = 0 if read in self.stored or self.is_input_value(read[0]) else _bytes(read)
            copied = read[1] == FULL and read[0] in self.values and self.values[read[0]].gated
            size = size // 2 if copied else size
            self._sizes[read] = size // 2 if self.packs and (copied or read[1] == HALF) else size
        return self._sizes[read]

    def _size_unpacked(self, read: Read) -> int:
        """The bytes that a value adds where a derivative outside of regions saves it, so that it is not packed."""
        in_half = self.packs and read[1] == HALF and not self.is_input_value(read[0])
        return _bytes(read) if in_half else self.size(read)

    def _results(self, run: Sequence[Step]) -> list[_Result]:
        """The results of a run that are read."""
        places = {id(step): i for i, step in enumerate(run)}
        return [
            _Result((v, storage), i, max(places.get(reader, len(run)) for reader in self.readers[v, storage]))
            for i, step in enumerate(run)
            for v in step.outvars
            for storage in ((FULL, HALF) if v in self.values and tracked(v) else (TRACED,))
            if (v, storage) in self.readers
        ]


class _Result(NamedTuple):
    """A value that a run computes, the step that computes it, and the last that reads it; the run's end if another."""

    read: Read
    step: int
    last_read: int


def _outs(results: Iterable[_Result], first: int, last: int) -> tuple[Read, ...]:
    """The results of a region that are read outside it."""
    return tuple(result.read for result in results if first <= result.step <= last < result.last_read)


def _signature(region: RematRegion) -> Any:
    """A key that regions with the same computation share. A region that closes over values gets its own key."""
    if any(step.closures for step in region.eqns):
        return id(region)

    def how(step: Step) -> Any:
        inner = (*map(id, step.inner.plans), step.inner.convention) if step.action is Action.ENTER else ()
        return step.action, step.reads, step.outs, step.broadcast, step.rounded_once, step.biases, step.half, inner

    storages = tuple(storage for _, storage in (*region.ins, *region.outs))
    outs = [v for v, _ in region.outs]
    form = form_of([step.eqn for step in region.eqns], region.invars, outs, len(region.scopes.stack))
    return form, storages, region.is_input, tuple(map(how, region.eqns))


def _bytes(read: Read) -> int:
    v, storage = read
    if not compat.is_shaped(v.aval):
        return 0
    return compat.numel(v.aval) * _ITEMSIZE.get(storage, v.aval.dtype.itemsize)


class Window:
    """A region that grows step by step, and the bytes that the run then stores."""

    def __init__(self, stretches: _Stretches, run: Sequence[Step], saved: Sequence[list[Read]], first: int, last: int):
        self.stretches = stretches
        self.ins: dict[Any, Storage] = {}
        self.bytes = 0
        self._outputs: set[Any] = set()
        self._counts: dict[Read, int] = {}
        for reads in saved:
            self._add(reads)
        for i in range(first, last + 1):
            self.extend_after(run[i], saved[i])

    @property
    def bytes_read(self) -> int:
        """The bytes of the activations that the region reads, whatever else stores them.

        0 if what regions read is kept in eight bits, apart from what matmuls store.
        """
        return (
            0
            if self.stretches.packs
            else sum(_bytes(read) for read in self.ins.items() if not self.stretches.is_input_value(read[0]))
        )

    def extend_before(self, step: Step, saved: Sequence[Read]) -> None:
        """Adds the step before the region."""
        for v in step.eqn.outvars:
            if v in self.ins:
                self._remove([(v, self.ins.pop(v))])
        self.extend_after(step, saved)

    def extend_after(self, step: Step, saved: Sequence[Read]) -> None:
        """Adds the step after the region."""
        self._outputs.update(step.eqn.outvars)
        for v, storage in step.all_reads:
            if v not in self._outputs:
                self._read(v, storage)
        self._remove(saved)

    def _read(self, v: Any, storage: Storage) -> None:
        """Makes a value an input, in half if it is stored in half, or a half copy of it is, or all steps read half."""
        known = self.ins.get(v)
        if storage != TRACED and (storage == FULL or self.stretches.is_input_value(v)):
            value = self.stretches.values[v]
            storage = HALF if value.copied else value.storage
        if known is None or (known, storage) == (HALF, FULL):
            if known is not None:
                self._remove([(v, known)])
            self.ins[v] = storage
            self._add([(v, storage)])

    def _add(self, reads: Sequence[Read]) -> None:
        for read in reads:
            count = self._counts[read] = self._counts.get(read, 0) + 1
            if count == 1:
                self.bytes += self.stretches.size(read)

    def _remove(self, reads: Sequence[Read]) -> None:
        for read in reads:
            count = self._counts[read] = self._counts.get(read, 0) - 1
            if count == 0:
                self.bytes -= self.stretches.size(read)
