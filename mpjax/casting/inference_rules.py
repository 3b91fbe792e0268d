"""The inference rule of each list: in which dtype an equation computes, given its operands and its consumers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpjax.casting.attention.division import EXPONENTIALS
from mpjax.casting.cancellation import is_centred
from mpjax.casting.classify import EXACT, OPAQUE, Listing, default_listing
from mpjax.casting.constants import out_of_range
from mpjax.casting.cross_entropy.head import CROSS_ENTROPY
from mpjax.casting.inference import ByList, Inference
from mpjax.casting.lattice import (
    FULL,
    HALF,
    NORMALIZED,
    STREAM,
    TRACED,
    Inferred,
    Level,
    Storage,
    castable,
    made_from,
)
from mpjax.casting.plan import Action, Step
from mpjax.casting.prepare import FORMS
from mpjax.casting.recompute import is_cheap
from mpjax.casting.setting import AS_TRACED, IN_FLOAT32, IN_HALF, Region, tracked
from mpjax.casting.states import is_gate
from mpjax.casting.streams import normalized_sums, residual_additions
from mpjax.casting.updates import is_step
from mpjax.casting.uses import GATED, STREAM_ADDITION, Use
from mpjax.kernels.lookup import selects
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, dataflow, variables
from mpjax.program.primitives import Op, Saves, primitive
from mpjax.program.source import is_backward

# By name: an equality is no order, and rounding changes it.


def _activation(level: Level) -> Level:
    """The level of a float32 result, which forces float32 on its consumers only if it is an activation."""
    return Level.FLOAT if level >= Level.HALF else level


def _allow(inference: Inference, eqn: Any, listing: Listing) -> Step:
    mixed = any(
        not tracked(v) and compat.is_inexact(v.aval) and v.aval.dtype != inference.setting.half for v in eqn.invars
    )
    if mixed or not any(map(tracked, eqn.invars)):
        return inference.in_float32(eqn, listing, Level.FLOAT, "its operands have other dtypes")
    # A loss's bias is added in float32: it may keep a padded vocabulary out.
    is_loss = eqn.primitive is CROSS_ENTROPY
    rounded = [eqn.invars[i] for i in eqn.params["options"].heads.places("xw")] if is_loss else eqn.invars
    if any(map(inference.is_beyond, rounded)):
        return inference.in_float32(eqn, listing, Level.FLOAT, out_of_range(inference.setting.half))
    chosen = listing.entry is not None or listing.region in IN_HALF or inference.setting.rules.level == "half"
    if not chosen and all(map(inference.is_integer, eqn.invars)):
        return inference.in_float32(eqn, listing, Level.COMPUTED, f"{EXACT} its operands are integers")
    fused = eqn.primitive in FORMS
    why = eqn.params["options"].kind if fused else listing.why
    return inference.in_half(eqn, listing, Level.HALF, why)


def _deny(inference: Inference, eqn: Any, listing: Listing) -> Step:
    level = _activation(inference.level(eqn))
    step = inference.in_float32(eqn, listing, level, listing.why)
    if listing is STREAM_ADDITION and level == Level.FLOAT:
        normalized = eqn.outvars[0] in normalized_sums(inference.jaxpr)
        # The sums of an optimizer's moments have no half copies: no layer reads them.
        copied = bool(inference.used(eqn) & Use.ANY_HALF)
        step.outs = (NORMALIZED if normalized else STREAM._replace(copied=copied),)
    if listing is GATED and level == Level.FLOAT:
        step.outs = (Inferred(Level.FLOAT, FULL, gated=True),)
    if eqn.primitive is EXPONENTIALS:
        of_rows = [Inferred(Level.FLOAT, FULL)] * (len(eqn.outvars) - 1)
        step.outs, inference.unchanged = (Inferred(Level.HALF, HALF), *of_rows), False
    return step


def _opaque(inference: Inference, eqn: Any, listing: Listing) -> Step:
    why = listing.why if listing.region in AS_TRACED else f"{OPAQUE} {listing.why}"
    why = IN_FLOAT32[Region.FLOAT] if listing.region == Region.FLOAT else why
    return inference.in_float32(eqn, listing, _activation(inference.level(eqn)), why)


def _read(inference: Inference, eqn: Any, listing: Listing) -> Step:
    storages = [value.storage for value in map(inference.value, eqn.invars) if value is not None]
    # JAX before 0.12 asks which operand of a maximum equals it: rounded, they are as equal as the maximum found them.
    # Later it asks for their order, too, and both answers must agree.
    if (
        eqn.primitive.name in ("eq", "ne")
        and sorted(storages) == sorted((HALF, FULL))
        and not _are_ordered(inference, eqn)
    ):
        reads = tuple(inference.read(v, HALF) for v in eqn.invars)
        return Step(eqn, Action.BIND, reads, (None,), "its result is not a float", listing)
    return inference.in_float32(eqn, listing, Level.COMPUTED, "its result is not a float")


def _are_ordered(inference: Inference, eqn: Any) -> bool:
    """Whether the program asks for the order of two values as well as whether they are equal."""
    readers = dataflow(inference.jaxpr).readers
    others = [each for v in variables(eqn.invars[:1]) for each in readers[v] if each.primitive.name not in ("eq", "ne")]
    return any(
        primitive(each.primitive.name).compares and {*map(id, each.invars)} == {*map(id, eqn.invars)} for each in others
    )


def _infer(inference: Inference, eqn: Any, listing: Listing) -> Step:
    level, row, why = inference.level(eqn), primitive(eqn.primitive.name), listing.why
    if listing.region == Region.PROMOTE:
        values = map(inference.value, eqn.invars)
        level = Level.FLOAT if any(x and x.level != Level.HALF for x in values) else level
    whole = all(map(inference.is_integer, eqn.invars)) or any(map(inference.is_beyond, eqn.invars))
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
    # The half copy of its result that a matmul reads may be exactly 1: the derivative follows from its half operand.
    exact = inference.setting.recompute and row.backward.saves is Saves.SATURATING and not listing.entry
    used = inference.used(eqn)
    if level == Level.HALF and exact and not used & Use.AMPLIFIED:
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: half activation, exact near saturation")
    if level == Level.HALF and row.adds and _updates_input(inference, eqn):
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: updates an input of the program")
    if level == Level.HALF and used & Use.AMPLIFIED and used & Use.ANY_HALF:
        step = inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: its rounding would be amplified")
        step.biases = inference.biases(eqn, listing)
        inference.unchanged = inference.unchanged and not step.biases
        return step
    if level == Level.HALF and used & Use.HALF and used & Use.FLOAT and not used & Use.MAY_HALF:
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: a float32 operation reads it too")
    if level == Level.HALF and used & Use.SUMMED:
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: half activation, a loop sums it up")
    if level == Level.HALF and used & Use.ANY_HALF and not used & Use.HALF and _may_overflow(inference, eqn):
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: may be beyond float16's range, and is stored")
    if level == Level.HALF and row.adds and _shifts(inference, eqn, used):
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: half activation, shifted")
    if level == Level.HALF and used & Use.ANY_HALF and _rounds_a_number(inference, eqn):
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: half activation, half would change its number")
    if level == Level.HALF and used & Use.ANY_HALF and _is_number(inference, eqn, listing):
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: half activation, a number")
    if level == Level.HALF and used & Use.ANY_HALF:
        return inference.in_half(eqn, listing, Level.HALF, f"{why}: half activation")
    if level == Level.HALF:
        return inference.in_float32(eqn, listing, Level.HALF, f"{why}: no path to a half operation")
    if level == Level.FLOAT:
        return inference.in_float32(eqn, listing, Level.FLOAT, f"{why}: float32 activation")
    return inference.in_float32(eqn, listing, level, f"{why}: parameters and inputs only")


def _may_overflow(inference: Inference, eqn: Any) -> bool:
    """Whether an equation's result follows from a product or power of activations, and is stored in memory.

    What arithmetic reads is not rounded on the way to a norm or a bound (`rounding`), nor what a call made of it
    returns. Loops, branches, checkpoints and sorts read memory. Not the sums of a residual stream, kept in half.
    """
    jaxpr, flow = inference.jaxpr, dataflow(inference.jaxpr)
    in_range = inference.setting.half != np.float16 or inference.setting.folded or is_backward(eqn)
    if in_range or not _is_stored(flow, eqn.outvars[0]):
        return False

    def terms(each: Any) -> Sequence[Any]:
        row = primitive(each.primitive.name)
        passes = row.is_affine and not row.kernel and each.outvars[0] not in residual_additions(jaxpr)
        return variables(each.invars) if passes else ()

    return any(_multiplies(inference, flow, each) for each in flow.made_by(eqn.outvars, terms))


def _is_stored(flow: Dataflow, v: Any) -> bool:
    """Whether what is no arithmetic reads a value, directly or after moves, or the program returns it."""
    return v in flow.returned or any(
        not is_cheap(each) or (primitive(each.primitive.name).op is Op.MOVE and _is_stored(flow, each.outvars[0]))
        for each in flow.readers.get(v, ())
    )


def _multiplies(inference: Inference, flow: Dataflow, eqn: Any) -> bool:
    """Whether an equation multiplies two activations of its result's size that are no gates, or one by itself."""
    row, size = primitive(eqn.primitive.name), compat.numel(eqn.outvars[0].aval)
    if default_listing(eqn).op is not Op.INFER or row.bounds != (-np.inf, np.inf):
        return False
    factors = [
        v
        for v in variables(eqn.invars)
        if compat.numel(flow.source(v, lambda maker: primitive(maker.primitive.name).whole).aval) == size
        and tracked(v)
        and not castable(inference.values[v])
        and not is_gate(flow, v)
    ]
    return len(factors) == 2 if row.multiplies else bool(factors) and not row.is_affine


def _shifts(inference: Inference, eqn: Any, used: Use) -> bool:
    """Whether it adds a parameter to a value whose mean is subtracted next, or that may saturate next.

    A bias before a norm and the offset of a gate may be larger than the value, whose bits half would lose. The sum
    follows from the half operand, so that nothing more is kept.
    """
    values = map(inference.value, eqn.invars)
    if not any(x is not None and castable(x) for x in values):
        return False
    return bool(used & Use.SATURATED) or (bool(used & Use.FLOAT) and is_centred(inference.jaxpr, eqn.outvars[0]))


def _rounds_a_number(inference: Inference, eqn: Any) -> bool:
    """Whether half could change a number by which an equation computes.

    The roundings of an array's elements average out in a sum. That of a number is the same in all of them, and in all
    layers: 24 products with 1.1, each half's 1.1016 in bfloat16, are 3.5 % too large.
    """
    if not primitive(eqn.primitive.name).pointwise or compat.numel(eqn.outvars[0].aval) == 1:
        return False
    numbers = [v for v in eqn.invars if tracked(v) and compat.numel(v.aval) == 1]
    setting = inference.setting
    return any(
        not (setting.represents(v) if isinstance(v, compat.Literal) else _is_half(inference, v)) for v in numbers
    )


def _is_number(inference: Inference, eqn: Any, listing: Listing) -> bool:
    """Whether the result is one number, of which half saves nothing: the steps of an unrolled recurrence round it."""
    chosen = listing.entry is not None or listing.region in IN_HALF or inference.setting.rules.level == "half"
    return not chosen and compat.numel(eqn.outvars[0].aval) == 1


def _is_half(inference: Inference, v: Any) -> bool:
    value = inference.value(v)
    return value is not None and value.storage == HALF


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
    if primitive(eqn.primitive.name).lookup and (stored_half or activation):
        return _half_lookup(inference, eqn, listing, HALF)
    if primitive(eqn.primitive.name).lookup and level >= Level.HALF and selects(eqn.invars[1].aval, eqn.params):
        inference.unchanged = False  # `rewrite` issues it in another form for GPUs and TPUs.
    exact = isinstance(operand, compat.Literal) and inference.setting.represents(operand)
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
    return primitive(eqn.primitive.name).lookup and eqn.invars[1].aval.ndim > 2


def _repeats(eqn: Any) -> bool:
    """Whether it looks up so many rows of a table that a half copy of the table costs less than it saves.

    A cast reads 4 bytes of each element and writes 2, and saves 2 of the 4 that the lookup reads of each.
    """
    table, rows = compat.numel(eqn.invars[0].aval), compat.numel(eqn.outvars[0].aval)
    return primitive(eqn.primitive.name).lookup and rows > 3 * table


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


BY_LIST: ByList = {
    Op.ALLOW: _allow,
    Op.DENY: _deny,
    Op.INFER: _infer,
    Op.WIDE: _wide,
    Op.MOVE: _move,
    Op.READ: _read,
    Op.CONVERT: _convert,
    Op.OPAQUE: _opaque,
}
