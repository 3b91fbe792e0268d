"""Forward inference: the dtype of each value of a program, and why.

A plan depends only on the jaxpr and the setting (no Python ids, no dict order), so the same program gives the same
rewritten jaxpr and compilation caches hit. Plans of sub-jaxprs are cached by jaxpr: a layer that is called many times
is planned once.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpjax.casting.attention.kernel import ATTENTION
from mpjax.casting.attention.prepare import constants, prepared, remember
from mpjax.casting.classify import EXACT, OPAQUE, UNTIL_TOLERANCE, Listing
from mpjax.casting.constants import constant, fits, folded, out_of_range
from mpjax.casting.lattice import (
    FULL,
    HALF,
    PARAMETER,
    TRACED,
    Inferred,
    Level,
    Storage,
    at_boundary,
    exact_in_half,
    literal_level,
    made_from,
    softened,
)
from mpjax.casting.plan import NOTHING, Action, MatmulCounts, Plan, Step, is_left_alone
from mpjax.casting.remat import with_regions
from mpjax.casting.scaled import Decision, decide
from mpjax.casting.setting import AS_TRACED, IN_FLOAT32, IN_HALF, Region, Setting, tracked
from mpjax.casting.updates import is_step
from mpjax.casting.uses import RESULT, Use, is_needed, uses
from mpjax.kernels.tpu import selects
from mpjax.kernels.weight_gradients import is_pointwise
from mpjax.policy import HALF_DTYPES
from mpjax.program import compat
from mpjax.program.derivative_rules import closed_over, closes_over_tracers
from mpjax.program.graph import may_hold_matmuls, paths_of, site_of, sub_jaxprs, walk
from mpjax.program.primitives import MATMULS, Op, is_product, primitive
from mpjax.program.source import join, module_of, source_line

_cache: weakref.WeakKeyDictionary[Any, dict[Any, Plan]] = weakref.WeakKeyDictionary()


def plan_jaxpr(jaxpr: Any, ins: tuple[Inferred | None, ...], wanted: tuple[Use, ...], setting: Setting) -> Plan:
    """The plan of a jaxpr.

    Args:
        jaxpr: An open or closed jaxpr.
        ins: The inferred dtypes of its inputs.
        wanted: The uses of its outputs.
        setting: Half dtype, rules, region.
    """
    jaxpr, consts = compat.open_jaxpr(jaxpr)
    if consts:
        remember(jaxpr, consts)
    known = _cache.setdefault(jaxpr, {})
    key = (ins, wanted, setting)
    if key not in known:
        program = prepared(jaxpr, setting)
        known[key] = Inference(program.jaxpr, ins, wanted, setting).plan()
        known[key].unfused = program.refused
    return known[key]


def plan_function(jaxpr: Any, setting: Setting, arrays: Sequence[Any] = ()) -> Plan:
    """The plan of a jaxpr whose inputs are castable, and whose outputs are returned in float32.

    Args:
        jaxpr: The jaxpr.
        setting: Half dtype, rules, region.
        arrays: Its inputs, if some of those that it was traced for as float32 are half.
    """
    opened = compat.open_jaxpr(jaxpr).jaxpr
    dtypes = [x.dtype for x in arrays] or [v.aval.dtype for v in opened.invars]
    storages = (HALF if dtype == setting.half else FULL for dtype in dtypes)
    given = zip(opened.invars, storages, strict=True)
    ins = tuple(Inferred(PARAMETER.level, storage) if tracked(v) else None for v, storage in given)
    wanted = tuple(RESULT if tracked(v) else Use.READ for v in opened.outvars)
    return plan_jaxpr(opened, ins, wanted, setting)


class Inference:
    """One forward pass over a program."""

    def __init__(self, jaxpr: Any, ins: Sequence[Inferred | None], wanted: tuple[Use, ...], setting: Setting):
        self.jaxpr, self.wanted, self.setting = jaxpr, wanted, setting
        self.uses, self.listings, _ = uses(jaxpr, wanted, setting)
        self.ins = tuple(ins)
        self.known = dict(constants(jaxpr))
        self.values: dict[Any, Inferred] = {
            v: constant(self.known.get(v), setting.half) for v in jaxpr.constvars if tracked(v)
        }
        self.values.update((v, x) for v, x in zip(jaxpr.invars, ins, strict=True) if x is not None)
        self.reads: dict[Any, int] = {}
        self.log: list[tuple[Any, Storage]] = []
        self.unchanged = True
        self.counts = MatmulCounts()

    def plan(self) -> Plan:
        """Infers the dtypes of all equations and returns the plan."""
        jaxpr = self.jaxpr
        inferred = [self._step(eqn, listed) for eqn, listed in zip(jaxpr.eqns, self.listings, strict=True)]
        steps: list[Any] = [step for step in inferred if step.action is not Action.SKIP]
        self.log = []
        outs = tuple(self._out(v, use) for v, use in zip(jaxpr.outvars, self.wanted, strict=True))
        if self.setting.recompute and not self.setting.folded and not self.unchanged:
            steps = with_regions(steps, self.values, self.uses, self.log)
        in_reads = tuple(self.reads.get(v, 0) for v in jaxpr.invars)
        return Plan(
            self.setting, steps, jaxpr.invars, jaxpr.constvars, jaxpr.outvars, self.ins, outs, in_reads,
            self.unchanged, self.counts,
        )  # fmt: skip

    # Values: what is inferred, and how they are read.

    def value(self, v: Any) -> Inferred | None:
        """The inferred dtype of a value; None if autocast leaves it alone."""
        if not tracked(v):
            return None
        if isinstance(v, compat.Literal):
            return Inferred(literal_level(v, self.setting.half), FULL)
        return self.values[v]

    def operand(self, v: Any) -> Inferred | None:
        """The inferred dtype of a value, for consumers on the infer list."""
        value = self.value(v)
        if value is None or isinstance(v, compat.Literal) or value.large:
            return value
        return value._replace(level=softened(value.level, self.use(v)))

    def use(self, v: Any) -> Use:
        """The uses of a value."""
        return self.uses.get(v, Use.NONE)

    def wanted_of(self, eqn: Any) -> tuple[Use, ...]:
        """The uses of an equation's outputs."""
        return tuple(self.use(v) for v in eqn.outvars)

    def read(self, v: Any, storage: Storage) -> Storage:
        """Records that a value is read in a storage dtype."""
        if not tracked(v):
            if not isinstance(v, compat.Literal):
                self.log.append((v, TRACED))
            return TRACED
        if not isinstance(v, compat.Literal):
            self.log.append((v, storage))
            self.reads[v] = self.reads.get(v, 0) | storage.bit
            if HALF in (storage, self.values[v].storage):
                self.unchanged = False
        return storage

    def used(self, eqn: Any) -> Use:
        """The union of the uses of an equation's outputs."""
        use = Use.NONE
        for v in eqn.outvars:
            use = use | self.use(v)
        return use

    def only_half(self, eqn: Any) -> bool:
        """Whether every consumer of an equation's outputs reads them in half."""
        return _only_half(self.used(eqn))

    def _out(self, v: Any, use: Use) -> Inferred | None:
        value = self.value(v)
        if value is None:
            self.read(v, TRACED)
            return None
        value = at_boundary(value, use)
        self.read(v, value.storage)
        return value

    def moved(self, v: Any, out: Any) -> Inferred:
        """The inferred dtype of a moved value: unchanged, or half if every consumer reads half."""
        value = self.value(v)
        assert value is not None
        if value.storage == HALF or isinstance(v, compat.Literal) or not _only_half(self.use(out)):
            return value
        if value.integers or value.large:
            return value  # They may need all bits, and their cast costs no memory.
        if value.level == Level.PINNED or (self.setting.rules.weight_gradients != "half" and castable(value)):
            return value  # Cast a parameter after the move, so that the move's gradient stays float32.
        return Inferred(Level.HALF if value.level == Level.FLOAT else value.level, HALF)

    # One equation.

    def _step(self, eqn: Any, listing: Listing) -> Step:
        self.log = []
        step = self._infer(eqn, listing)
        if step.action is Action.ENTER and not self.setting.in_rule:
            step.closures = closed_over(self.jaxpr, eqn)
            for v in step.closures:
                self.read(v, FULL)
        step.all_reads = tuple(self.log)
        self.counts += _counts_of(step)
        if step.action is Action.SKIP:
            self.values.update((v, Inferred(Level.COMPUTED, FULL)) for v in eqn.outvars if tracked(v))
            return step
        integers, large = self._keeps_integers(eqn), self._keeps_large(eqn)
        for v, value in zip(eqn.outvars, step.outs, strict=True):
            if value is not None:
                self.values[v] = value._replace(integers=integers or value.integers, large=large or value.large)
                self.unchanged &= value.storage != HALF
        return step

    def _infer(self, eqn: Any, listing: Listing) -> Step:
        if not is_needed(eqn, map(self.use, eqn.outvars)):
            # Issued as traced, its unused outputs would be differentiated too.
            self.unchanged &= self.setting.in_rule or not closes_over_tracers(self.jaxpr, eqn)
            return Step(eqn, Action.SKIP, (), (), "nothing reads it", listing)
        results = folded(eqn, self.known)
        self.known |= results
        if not all(fits(x, self.setting.half) for x in results.values()):
            step = self.in_float32(eqn, listing, Level.FLOAT, out_of_range(self.setting.half))
            step.outs = tuple(x and x._replace(large=True) for x in step.outs)
            return step
        if listing.op is Op.ENTER:
            step = self.setting.higher_order[eqn.primitive.name].infer(self, eqn, listing)
            self.unchanged &= step.action is Action.BIND
            return step
        if not any(map(tracked, eqn.invars)) and not any(map(tracked, eqn.outvars)):
            reads = tuple(self.read(v, TRACED) for v in eqn.invars)
            return Step(eqn, Action.BIND, reads, (None,) * len(eqn.outvars), "no float32", listing)
        return _BY_LIST[listing.op](self, eqn, listing)

    def is_integer(self, v: Any) -> bool:
        """Whether an operand holds integers by construction."""
        if isinstance(v, compat.Literal):
            value = np.asarray(v.val)
            return bool(np.all(value == np.rint(value))) if compat.is_inexact(v.aval) else True
        return self.values[v].integers if tracked(v) else not compat.is_inexact(v.aval)

    def _keeps_integers(self, eqn: Any) -> bool:
        """Whether the results of an equation are integers by construction."""
        return primitive(eqn.primitive.name).keeps_integers and all(map(self.is_integer, eqn.invars))

    def is_large(self, v: Any) -> bool:
        """Whether an operand holds a constant's numbers that half can't represent."""
        return tracked(v) and not isinstance(v, compat.Literal) and self.values[v].large

    def _keeps_large(self, eqn: Any) -> bool:
        """Whether the results of an equation have such elements."""
        return primitive(eqn.primitive.name).keeps_values and any(map(self.is_large, eqn.invars))

    def level(self, eqn: Any) -> Level:
        """The level of a result that depends on all inputs of an equation."""
        levels = [value.level for value in map(self.operand, eqn.invars) if value is not None]
        if not levels:
            return made_from(eqn)
        level = max(levels)
        return Level.FLOAT if level == Level.PINNED else max(level, Level.COMPUTED)

    def in_float32(self, eqn: Any, listing: Listing, level: Level, why: str) -> Step:
        """A step that computes in float32."""
        reads = tuple(self.read(v, FULL) for v in eqn.invars)
        outs = tuple(Inferred(level, FULL) if tracked(v) else None for v in eqn.outvars)
        return Step(eqn, Action.BIND, reads, outs, why, listing)

    def in_half(self, eqn: Any, listing: Listing, level: Level, why: str) -> Step:
        """A step that computes in half, or with scales from parameters in float32 and activations in half."""
        scaled, smaller, parameters = self._scaled(eqn), _smaller_operands(eqn), self._parameters(eqn)
        is_scaled = scaled is not None and bool(scaled.dtypes)
        if scaled is not None:
            why = f"{why}{scaled}"
        wide = parameters if is_scaled else smaller
        reads = tuple(self.read(v, FULL if i in wide else HALF) for i, v in enumerate(eqn.invars))
        if eqn.primitive.name == "mul":
            for i in smaller:
                self.read(eqn.invars[i], HALF)
        for i in () if is_scaled else parameters:
            self.read(eqn.invars[i], FULL)
        outs = tuple(Inferred(level, HALF) if tracked(v) else None for v in eqn.outvars)
        self.unchanged = False
        return Step(
            eqn, Action.BIND, reads, outs, why, listing, half=True,
            broadcast=smaller, parameters=parameters, wide_gradients=self._wide_gradients(eqn), scaled=scaled,
        )  # fmt: skip

    def _scaled(self, eqn: Any) -> Decision | None:
        """Whether a matmul runs in a format with scales; None if it is no matmul, or the policy has none."""
        setting = self.setting
        if setting.scaled is None or eqn.primitive.name not in MATMULS or eqn.primitive is ATTENTION:
            return None
        values = map(self.value, eqn.invars[:2])
        parameters = [None if value is None else castable(value) for value in values]
        paths = paths_of(eqn, join(setting.path, module_of(eqn)), setting.owners) if setting.scaled.entries else ()
        return decide(eqn, parameters, bool(self.used(eqn) & Use.ANY_HALF), setting.scaled, paths)

    def _parameters(self, eqn: Any) -> tuple[int, ...]:
        """The indices of a matmul's float32 operands that are parameters, or computed only from parameters."""
        is_matmul = eqn.primitive.name in MATMULS and eqn.primitive is not ATTENTION
        if not is_matmul or self.setting.rules.weight_gradients == "half":
            return ()
        indices = []
        for i, v in enumerate(eqn.invars[:2]):
            value = None if isinstance(v, compat.Literal) else self.value(v)
            if value is not None and value.storage == FULL and castable(value):
                indices.append(i)
        return tuple(indices)

    def _wide_gradients(self, eqn: Any) -> bool:
        """Whether a matmul or convolution can write the gradient of a parameter in float32."""
        if eqn.primitive.name != "conv_general_dilated" or self.setting.rules.weight_gradients == "everywhere":
            return True
        return is_pointwise(eqn.params, eqn.invars[1].aval.shape)


def castable(value: Inferred) -> bool:
    """Whether a value is a parameter or an input, or computed only from these; not rows that a batch looks up."""
    return value.level <= Level.COMPUTED


def _only_half(use: Use) -> bool:
    return bool(use & Use.HALF) and not use & (Use.FLOAT | Use.MAY_HALF)


def _counts_of(step: Step) -> MatmulCounts:
    is_matmul = step.eqn.primitive.name in MATMULS and not is_product(step.eqn) and step.action is not Action.SKIP
    left_alone, hides = is_left_alone(step), not step.listing.region and may_hold_matmuls(step.eqn)
    if not is_matmul and not left_alone and not hides and step.inner is None and step.listing.entry is None:
        return NOTHING
    entries = frozenset(() if step.listing.entry is None else (step.listing.entry,))
    if step.scaled is not None and step.scaled.entry is not None:
        entries |= {step.scaled.entry}
    left = int(hides)
    if left_alone:
        left = sum(_is_float32_matmul(site.eqn) for j in sub_jaxprs(step.eqn) for site in walk(j.jaxpr))
    counts = MatmulCounts(left=left, entries=entries)
    if step.scaled is not None:
        why = step.scaled.why
        counts += MatmulCounts(scaled=int(not why), why_not_scaled=frozenset({why} if why else ()))
    if left and not step.listing.region and not primitive(step.eqn.primitive.name).solve:
        counts += MatmulCounts(hidden=frozenset({site_of(step.eqn).label}))
    for inner in (*step.plans, *step.rules):
        counts += inner.counts
    loops = counts.loops | {""} if step.listing == UNTIL_TOLERANCE else counts.loops
    if "" in loops:  # JAX's own functions have no line, but their callers do.
        line = source_line(step.eqn)
        counts = dataclasses.replace(counts, loops=loops - {""} | {line})
    if is_matmul:
        if step.half:
            counts += MatmulCounts(cast=1)
        elif all(v.aval.dtype in HALF_DTYPES for v in step.eqn.invars[:2]):
            by_region = step.listing.region in IN_HALF  # half_function cast their operands.
            counts += MatmulCounts(cast=1) if by_region else MatmulCounts(written=1)
        elif _is_float32_matmul(step.eqn):
            counts += MatmulCounts(left=1)
    return counts


def _is_float32_matmul(eqn: Any) -> bool:
    return eqn.primitive.name in MATMULS and not is_product(eqn) and any(map(tracked, eqn.invars))


def _smaller_operands(eqn: Any) -> tuple[int, ...]:
    """The operands that an equation in half reads in float32: those that it broadcasts, and the biases of attention."""
    if eqn.primitive is ATTENTION:
        return eqn.params["options"].biases
    if not primitive(eqn.primitive.name).elementwise:
        return ()
    shape = eqn.outvars[0].aval.shape
    return tuple(
        i
        for i, v in enumerate(eqn.invars)
        if tracked(v) and v.aval.shape != shape and not isinstance(v, compat.Literal)
    )


# The inference rule of each list.


def _activation(level: Level) -> Level:
    """The level of a float32 result, which forces float32 on its consumers only if it is an activation."""
    return Level.FLOAT if level >= Level.HALF else level


def _allow(inference: Inference, eqn: Any, listing: Listing) -> Step:
    mixed = any(
        not tracked(v) and compat.is_inexact(v.aval) and v.aval.dtype != inference.setting.half for v in eqn.invars
    )
    if mixed or not any(map(tracked, eqn.invars)):
        return inference.in_float32(eqn, listing, Level.FLOAT, "its operands have other dtypes")
    if any(map(inference.is_large, eqn.invars)):
        return inference.in_float32(eqn, listing, Level.FLOAT, out_of_range(inference.setting.half))
    chosen = listing.entry is not None or listing.region in IN_HALF or inference.setting.rules.level == "half"
    if not chosen and all(map(inference.is_integer, eqn.invars)):
        return inference.in_float32(eqn, listing, Level.COMPUTED, f"{EXACT} its operands are integers")
    why = eqn.params["options"].kind if eqn.primitive is ATTENTION else listing.why
    return inference.in_half(eqn, listing, Level.HALF, why)


def _deny(inference: Inference, eqn: Any, listing: Listing) -> Step:
    return inference.in_float32(eqn, listing, _activation(inference.level(eqn)), listing.why)


def _opaque(inference: Inference, eqn: Any, listing: Listing) -> Step:
    why = listing.why if listing.region in AS_TRACED else f"{OPAQUE} {listing.why}"
    why = IN_FLOAT32[Region.FLOAT] if listing.region == Region.FLOAT else why
    return inference.in_float32(eqn, listing, _activation(inference.level(eqn)), why)


def _read(inference: Inference, eqn: Any, listing: Listing) -> Step:
    return inference.in_float32(eqn, listing, Level.COMPUTED, "its result is not a float")


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    level, row, why = inference.level(eqn), primitive(eqn.primitive.name), listing.why
    if listing.region == Region.PROMOTE:
        values = map(inference.value, eqn.invars)
        level = Level.FLOAT if any(x and x.level != Level.HALF for x in values) else level
    whole = all(map(inference.is_integer, eqn.invars)) or any(map(inference.is_large, eqn.invars))
    if (
        row.join
        and inference.only_half(eqn)
        and level != Level.PINNED
        and not whole
        and not _joins_parameters(inference, eqn, level)
    ):
        return inference.in_half(eqn, listing, min(level, Level.HALF), f"{why}: only its half value is read")
    if eqn.params.get("out_dtype") is not None:
        return inference.in_float32(eqn, listing, _activation(level), "the user fixed its output dtype")
    # A matmul stores its half result, from which its derivative follows; anything else stores its half operand.
    exact = inference.setting.recompute and row.saturating and not listing.entry
    if level == Level.HALF and exact and not inference.used(eqn) & Use.HALF:
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: half activation, exact near saturation")
    used = inference.used(eqn)
    if level == Level.HALF and row.adds and _updates_input(inference, eqn):
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: updates an input of the program")
    if level == Level.HALF and used & Use.AMPLIFIED and used & Use.ANY_HALF:
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: its rounding would be amplified")
    if level == Level.HALF and used & Use.HALF and used & Use.FLOAT and not used & Use.MAY_HALF:
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: a float32 operation reads it too")
    if level == Level.HALF and used & Use.ANY_HALF:
        return inference.in_half(eqn, listing, Level.HALF, f"{why}: half activation")
    if level == Level.HALF:
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: no path to a half operation")
    if level == Level.FLOAT:
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: float32 activation")
    return inference.in_float32(eqn, listing, level, f"{why}: parameters and inputs only")


def _updates_input(inference: Inference, eqn: Any) -> bool:
    """Whether it adds a multiple of a function of an input, or of what is computed from inputs only, to that input."""
    return any(
        x is not None and castable(x) and is_step(inference.jaxpr, eqn, v)
        for v, x in ((v, inference.value(v)) for v in eqn.invars)
        if not isinstance(v, compat.Literal)
    )


def _joins_parameters(inference: Inference, eqn: Any, level: Level) -> bool:
    """Whether it joins parameters before they are cast, so that their gradient stays float32.

    Not the parameters that all iterations of a loop read (the kernels of an LSTM): their half copies are made once,
    before the loop, and the gradients of the iterations are summed in float32.
    """
    if level > Level.COMPUTED or inference.setting.rules.weight_gradients == "half":
        return False
    invariants = inference.jaxpr.invars[: inference.setting.invariants]
    return not all(isinstance(v, compat.Literal) or v in invariants for v in eqn.invars)


def _wide(inference: Inference, eqn: Any, listing: Listing) -> Step:
    levels = [value.level for value in map(inference.operand, eqn.invars) if value is not None]
    level = max(levels, default=Level.COMPUTED)
    if level == Level.INPUT:
        level = Level.COMPUTED
    pinned = level == Level.PINNED
    if pinned:
        level = Level.FLOAT
    operand = eqn.invars[0]
    if primitive(eqn.primitive.name).replicates and level == Level.COMPUTED and inference.only_half(eqn):
        return _replicate(inference, eqn, listing)
    if level == Level.COMPUTED and _looks_up_activations(eqn):
        level = Level.LOOKED_UP
    if (
        _repeats(eqn)
        and not inference.is_integer(eqn.invars[0])
        and level in (Level.COMPUTED, Level.LOOKED_UP)
        and inference.only_half(eqn)
    ):
        return _half_lookup(inference, eqn, listing, FULL)
    value = inference.value(operand)
    stored_half = value is not None and value.storage == HALF and castable(value)  # The rows are exact in half.
    activation = level >= Level.HALF and not pinned and inference.only_half(eqn)
    if eqn.primitive.name == "gather" and (stored_half or activation):
        return _half_lookup(inference, eqn, listing, HALF)
    if eqn.primitive.name == "gather" and level >= Level.HALF and selects(eqn.invars[1].aval, eqn.params):
        inference.unchanged = False  # `rewrite` issues it in another form for a TPU.
    exact = isinstance(operand, compat.Literal) and exact_in_half(operand, inference.setting.half)
    if exact and inference.only_half(eqn):
        return inference.in_half(eqn, listing, level, "a constant that half represents exactly")
    return inference.in_float32(eqn, listing, level, f"{listing.why}: its derivative is a sum")


def _replicate(inference: Inference, eqn: Any, listing: Listing) -> Step:
    """Replicates a parameter that only half operations read: half is sent to the other devices."""
    if inference.setting.rules.weight_gradients == "half":
        return inference.in_half(eqn, listing, Level.COMPUTED, "only its half value is read")
    if primitive(eqn.primitive.name).whole:
        return inference.in_float32(eqn, listing, Level.COMPUTED, f"{listing.why}: its derivative is a sum")
    return _half_move(inference, eqn, listing, "gathers half values; sums the gradient in float32")


def _half_move(inference: Inference, eqn: Any, listing: Listing, why: str) -> Step:
    """Moves a parameter that only half operations read, in half; its gradient stays float32."""
    step = inference.in_float32(eqn, listing, Level.COMPUTED, why)
    step.half_move, inference.unchanged = True, False
    return step


def _half_lookup(inference: Inference, eqn: Any, listing: Listing, storage: Storage) -> Step:
    """Looks up rows of a parameter, or of an activation or a half parameter in half."""
    reads = tuple(inference.read(v, storage) for v in eqn.invars)
    inference.unchanged = False
    outs, why = (Inferred(Level.HALF, HALF),), "looks up half rows; sums their gradients in float32"
    return Step(eqn, Action.BIND, reads, outs, why, listing, half_move=True)


def _looks_up_activations(eqn: Any) -> bool:
    """Whether it looks up rows for each position of each example, as an embedding does.

    Such rows are activations: a gradient of theirs sums over no batch. A permuted weight has one index for each row.
    """
    return eqn.primitive.name == "gather" and eqn.invars[1].aval.ndim > 2


def _repeats(eqn: Any) -> bool:
    """Whether it looks up so many rows of a table that a half copy of the table costs less than it saves.

    A cast reads 4 bytes of each element and writes 2, and saves 2 of the 4 that the lookup reads of each.
    """
    return eqn.primitive.name == "gather" and compat.numel(eqn.outvars[0].aval) > 3 * compat.numel(eqn.invars[0].aval)


def _move(inference: Inference, eqn: Any, listing: Listing) -> Step:
    moved = [v for v in eqn.invars if tracked(v)]
    outs = [v for v in eqn.outvars if tracked(v)]
    if len(moved) != 1 and len(moved) != len(outs):
        return _deny(inference, eqn, listing)
    if primitive(eqn.primitive.name).communicates and inference.only_half(eqn):
        value = inference.value(moved[0])
        assert value is not None
        if value.storage == FULL and castable(value) and inference.setting.rules.weight_gradients != "half":
            return _half_move(inference, eqn, listing, "sends half values; the gradient stays float32")
    sources = moved * len(outs) if len(moved) == 1 else moved
    values = [inference.moved(v, out) for v, out in zip(sources, outs, strict=True)]
    if len(moved) == 1 and len({x.storage for x in values}) > 1:
        values = [Inferred(x.level, FULL) for x in values]
    stored = [x.storage for x in values] or [FULL]
    storages = iter(stored[:1] if len(moved) == 1 else stored)
    reads = tuple(inference.read(v, next(storages)) if tracked(v) else inference.read(v, TRACED) for v in eqn.invars)
    inferred = iter(values)
    results = tuple(next(inferred) if tracked(v) else None for v in eqn.outvars)
    return Step(eqn, Action.BIND, reads, results, listing.why, listing, half=stored[0] == HALF)


def _convert(inference: Inference, eqn: Any, listing: Listing) -> Step:
    (v,), (out,) = eqn.invars, eqn.outvars
    value, why = inference.value(v), "the user's cast"
    if value is None:  # a cast to float32
        if listing.region in IN_HALF and v.aval.dtype == inference.setting.half:
            inference.unchanged = False
            half = (Inferred(Level.HALF, HALF),)
            return Step(
                eqn, Action.ALIAS, (inference.read(v, TRACED),), half, IN_HALF[listing.region], listing, half=True
            )
        pinned = compat.is_inexact(v.aval) and v.aval.dtype.itemsize < 4 and listing.region not in AS_TRACED
        level = Level.PINNED if pinned else made_from(eqn)
        return Step(eqn, Action.BIND, (inference.read(v, TRACED),), (Inferred(level, FULL),), why, listing)
    if tracked(out):  # a cast that changes only the weak type
        if isinstance(v, compat.Literal):
            return inference.in_float32(eqn, listing, value.level, why)
        value = inference.moved(v, out)
        reads = (inference.read(v, value.storage),)
        return Step(eqn, Action.ALIAS, reads, (value,), "keeps its dtype", listing, half=value.storage == HALF)
    stored = value.storage == HALF or listing.region in IN_HALF
    if out.aval.dtype == inference.setting.half and stored and not isinstance(v, compat.Literal):
        return Step(eqn, Action.ALIAS, (inference.read(v, HALF),), (None,), why, listing, half=True)
    return Step(eqn, Action.BIND, (inference.read(v, FULL),), (None,), why, listing)


_BY_LIST: dict[Op, Callable[[Inference, Any, Listing], Step]] = {
    Op.ALLOW: _allow,
    Op.DENY: _deny,
    Op.INFER: _infer,
    Op.WIDE: _wide,
    Op.MOVE: _move,
    Op.READ: _read,
    Op.CONVERT: _convert,
    Op.OPAQUE: _opaque,
}
