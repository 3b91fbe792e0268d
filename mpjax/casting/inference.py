"""Forward inference: the dtype of each value of a program, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from mpjax.casting.attention.division import AVERAGE
from mpjax.casting.attention.kernel import ATTENTION
from mpjax.casting.attention.prepare import constants
from mpjax.casting.classify import Listing
from mpjax.casting.constants import beyond_half, beyond_of_result, constant, folded, out_of_range
from mpjax.casting.cross_entropy.head import CROSS_ENTROPY
from mpjax.casting.lattice import (
    FULL,
    HALF,
    NORMALIZED,
    TRACED,
    Inferred,
    Level,
    Storage,
    at_boundary,
    castable,
    literal_level,
    made_from,
    softened,
    storage_of,
)
from mpjax.casting.packing import mark_gated, mark_packed
from mpjax.casting.plan import Action, MatmulCounts, Plan, Step, counts_of
from mpjax.casting.prepare import FORMS
from mpjax.casting.remat import with_regions
from mpjax.casting.scaled import Decision, decide
from mpjax.casting.setting import IN_HALF, Setting, tracked
from mpjax.casting.streams import normalized_sums
from mpjax.casting.uses import Use, is_needed, uses
from mpjax.kernels.weight_gradients import is_pointwise
from mpjax.program import compat
from mpjax.program.dataflow import variables
from mpjax.program.derivative_rules import closed_over, closes_over_tracers
from mpjax.program.graph import paths_of
from mpjax.program.primitives import MATMULS, Op, primitive
from mpjax.program.source import join, module_of

# By name: matmuls and convolutions have different parameters.

_FUSED = (ATTENTION, CROSS_ENTROPY)
# The rule of each list: how an equation runs, given its operands and its consumers.
ByList: TypeAlias = "Mapping[Op, Callable[[Inference, Any, Listing], Step]]"


class Inference:
    """One forward pass over a program.

    Args:
        jaxpr, ins, wanted, setting: As in `infer.plan_jaxpr`.
        by_list: The rule of each list.
    """

    def __init__(
        self, jaxpr: Any, ins: Sequence[Inferred | None], wanted: tuple[Use, ...], setting: Setting, by_list: ByList
    ):
        self.jaxpr, self.wanted, self.setting, self.by_list = jaxpr, wanted, setting, by_list
        self.uses, self.listings, _ = uses(jaxpr, wanted, setting)
        self.ins = tuple(ins)
        self.known = dict(constants(jaxpr))
        self.values: dict[Any, Inferred] = {
            v: constant(self.known.get(v), setting.half) for v in jaxpr.constvars if tracked(v)
        }
        for v, x in zip(jaxpr.invars, ins, strict=True):
            if x is not None:
                self.values[v] = NORMALIZED if x.copied and v in normalized_sums(jaxpr) else x
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
        rules = self.setting.rules
        if rules.residuals != "full" and not self.setting.folded and not self.unchanged:
            forms = self.setting.recompute, self.setting.packs, rules.level == "half"
            steps = with_regions(steps, self.values, self.uses, self.log, *forms)
            mark_gated(steps, self.values, jaxpr, self.setting)
            if self.setting.packs:
                packed = mark_packed(steps, self.values, jaxpr, self.setting.rules.residuals)
                self.counts += MatmulCounts(packed=packed)
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
        if value is None or isinstance(v, compat.Literal) or value.beyond:
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
        value = at_boundary(value, use, self.setting.inlined)
        self.read(v, value.storage)
        return value

    def moved(self, v: Any, out: Any) -> Inferred:
        """The inferred dtype of a moved value: unchanged, or half if every consumer reads half."""
        value = self.value(v)
        assert value is not None
        if value.storage == HALF or isinstance(v, compat.Literal) or not _only_half(self.use(out)):
            return value
        if value.integers or value.beyond:
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
        self.counts += counts_of(step)
        if step.action is Action.SKIP:
            self.values.update((v, Inferred(Level.COMPUTED, FULL)) for v in eqn.outvars if tracked(v))
            return step
        integers = self._keeps_integers(eqn)
        beyond = beyond_of_result(eqn, [*map(self.value, eqn.invars)])
        for v, value in zip(eqn.outvars, step.outs, strict=True):
            if value is not None:
                self.values[v] = value._replace(integers=integers or value.integers, beyond=beyond | value.beyond)
                self.unchanged &= value.storage != HALF
        return step

    def _infer(self, eqn: Any, listing: Listing) -> Step:
        if not is_needed(eqn, map(self.use, eqn.outvars)):
            # Issued as traced, its unused outputs would be differentiated too.
            self.unchanged &= self.setting.in_rule or not closes_over_tracers(self.jaxpr, eqn)
            return Step(eqn, Action.SKIP, (), (), "nothing reads it", listing)
        results = folded(eqn, self.known)
        self.known |= results
        beyond = beyond_half(self.setting.half, *results.values())
        if beyond:
            if listing.op is Op.ENTER:  # What it contains runs as traced.
                listing = listing._replace(op=Op.OPAQUE)
            step = self.in_float32(eqn, listing, Level.FLOAT, out_of_range(self.setting.half))
            step.outs = tuple(x and x._replace(beyond=beyond) for x in step.outs)
            return step
        if listing.op is Op.ENTER:
            step = self.setting.higher_order[eqn.primitive.name].infer(self, eqn, listing)
            self.unchanged &= step.action is Action.BIND
            return step
        if not any(map(tracked, eqn.invars)) and not any(map(tracked, eqn.outvars)):
            reads = tuple(self.read(v, TRACED) for v in eqn.invars)
            return Step(eqn, Action.BIND, reads, (None,) * len(eqn.outvars), "no float32", listing)
        return self.by_list[listing.op](self, eqn, listing)

    def is_integer(self, v: Any) -> bool:
        """Whether an operand holds integers by construction."""
        if isinstance(v, compat.Literal):
            value = np.asarray(v.val)
            return bool(np.all(value == np.rint(value))) if compat.is_inexact(v.aval) else True
        return self.values[v].integers if tracked(v) else not compat.is_inexact(v.aval)

    def _keeps_integers(self, eqn: Any) -> bool:
        """Whether the results of an equation are integers by construction."""
        return primitive(eqn.primitive.name).keeps_integers and all(map(self.is_integer, eqn.invars))

    def is_beyond(self, v: Any) -> bool:
        """Whether an operand holds a constant's numbers that half can't represent."""
        return tracked(v) and not isinstance(v, compat.Literal) and bool(self.values[v].beyond)

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
        rounded_once = self._rounded_once(eqn, listing)
        smaller = rounded_once or smaller
        is_scaled = scaled is not None and bool(scaled.dtypes)
        if scaled is not None:
            why = f"{why}{scaled}"
        wide = parameters if is_scaled else smaller
        reads = tuple(self.read(v, FULL if i in wide else HALF) for i, v in enumerate(eqn.invars))
        if primitive(eqn.primitive.name).multiplies:
            for i in smaller:
                self.read(eqn.invars[i], FULL if rounded_once else HALF)
        for i in () if is_scaled else parameters:
            self.read(eqn.invars[i], FULL)
        out = Inferred(Level.FLOAT, FULL) if eqn.primitive is CROSS_ENTROPY else Inferred(level, HALF)
        out = Inferred(level, FULL) if eqn.primitive is AVERAGE else out
        outs = tuple(out if tracked(v) else None for v in eqn.outvars)
        self.unchanged = False
        return Step(
            eqn, Action.BIND, reads, outs, why, listing, half=True,
            broadcast=smaller, parameters=parameters, wide_gradients=self._wide_gradients(eqn), scaled=scaled,
            rounded_once=bool(rounded_once),
        )  # fmt: skip

    def _rounded_once(self, eqn: Any, listing: Listing) -> tuple[int, ...]:
        """The parameter that an equation adds to an activation, or multiplies it by; none if it must run in half."""
        row, rules = primitive(eqn.primitive.name), self.setting.rules
        if not (row.adds or row.multiplies) or rules.level == "half" or listing.entry or listing.region in IN_HALF:
            return ()
        if self._is_wide(eqn):
            return (0,) if isinstance(eqn.invars[1], compat.Literal) else (1,)
        found = tuple(i for i, v in enumerate(eqn.invars) if self._is_parameter(v))
        whole = {i for i, v in enumerate(eqn.invars) if v.aval.shape == eqn.outvars[0].aval.shape}
        if len(found) != 1 or (row.multiplies and not whole - {*found}):
            return ()
        # The derivative of a product keeps the factor: of a computed one, such as a dropout's mask, the half copy.
        factor = eqn.invars[found[0]]
        return () if row.multiplies and found[0] in whole and self.values[factor].level != Level.INPUT else found

    def _is_wide(self, eqn: Any) -> bool:
        """Whether an equation adds a number to a value that is float32 for another reader."""
        if not primitive(eqn.primitive.name).adds or len(variables(eqn.invars)) != 1:
            return False
        value = self.value(variables(eqn.invars)[0])
        return value is not None and value.storage == FULL and value.level == Level.HALF

    def biases(self, eqn: Any, listing: Listing) -> tuple[int, ...]:
        """The parameter that an equation adds to an activation of which half is stored."""
        added = self._rounded_once(eqn, listing) if primitive(eqn.primitive.name).adds else ()
        return added if added and storage_of(self.value(eqn.invars[1 - added[0]])) == HALF else ()

    def _scaled(self, eqn: Any) -> Decision | None:
        """Whether a matmul runs in a format with scales; None if it is no matmul, or the policy has none."""
        setting = self.setting
        if setting.scaled is None or eqn.primitive.name not in MATMULS or eqn.primitive in _FUSED:
            return None
        values = map(self.value, eqn.invars[:2])
        parameters = [None if value is None else castable(value) for value in values]
        paths = paths_of(eqn, join(setting.path, module_of(eqn)), setting.owners) if setting.scaled.entries else ()
        return decide(eqn, parameters, bool(self.used(eqn) & Use.ANY_HALF), setting.scaled, paths)

    def _parameters(self, eqn: Any) -> tuple[int, ...]:
        """The indices of a matmul's float32 operands that are parameters, or computed only from parameters."""
        is_matmul = eqn.primitive.name in MATMULS and eqn.primitive not in _FUSED
        if not is_matmul or self.setting.rules.weight_gradients == "half":
            return ()
        return tuple(i for i, v in enumerate(eqn.invars[:2]) if self._is_parameter(v))

    def _is_parameter(self, v: Any) -> bool:
        """Whether a value is a parameter, or computed only from parameters, in float32."""
        value = None if isinstance(v, compat.Literal) else self.value(v)
        return value is not None and value.storage == FULL and castable(value)

    def _wide_gradients(self, eqn: Any) -> bool:
        """Whether a matmul or convolution can write the gradient of a parameter in float32."""
        if eqn.primitive.name != "conv_general_dilated" or self.setting.rules.weight_gradients == "everywhere":
            return True
        return is_pointwise(eqn.params, eqn.invars[1].aval.shape)


def _only_half(use: Use) -> bool:
    return bool(use & Use.HALF) and not use & (Use.FLOAT | Use.MAY_HALF)


def _smaller_operands(eqn: Any) -> tuple[int, ...]:
    """The operands that an equation in half reads in float32: those that it broadcasts, and biases and heads."""
    if eqn.primitive in FORMS:
        return eqn.params["options"].floats
    if not primitive(eqn.primitive.name).elementwise:
        return ()
    shape = eqn.outvars[0].aval.shape
    return tuple(
        i
        for i, v in enumerate(eqn.invars)
        if tracked(v) and v.aval.shape != shape and not isinstance(v, compat.Literal)
    )
