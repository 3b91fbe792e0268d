"""Backward analysis: the consumers of each value.

Uses propagate from the consumers of a value back to it. They tell whether any consumer gains from half. If none does
(the loss, the final softmax), the value stays in float32.
"""

from __future__ import annotations

import enum
import functools
import operator
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax.casting.cancellation import cancels
from mpjax.casting.classify import EXACT, Listing, classify, is_inner_product
from mpjax.casting.prepare import FORMS, prepared
from mpjax.casting.setting import FLOAT32, IN_HALF, Setting, tracked
from mpjax.casting.streams import gated_additions, residual_additions
from mpjax.casting.updates import repeated_updates
from mpjax.program import compat
from mpjax.program.dataflow import dataflow, variables
from mpjax.program.derivative_rules import closed_over
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import Op, Saves, primitive


class Use(enum.IntFlag):
    """How the consumers of a value read it."""

    NONE = 0
    READ = 1  # Some operation reads it.
    FLOAT = 2  # Some operation reads it in float32.
    MAY_HALF = 4  # An operation of any dtype reads it, on a path to one that runs in half.
    HALF = 8  # An operation that runs in half reads it, directly or after moves.
    RETURNED = 16  # The function returns it.
    AMPLIFIED = 32  # Its rounding is amplified, by an operation that no matmul or sum comes before.
    EXACT = 64  # A conversion to integers, a decomposition or a solve reads it, after affine operations at most.
    SATURATED = 128  # An operation that may saturate reads it, after additions of numbers at most.
    SUMMED = 256  # A loop adds it to a sum, or multiplies the sum by it.
    BY_NUMBER = 512  # Like MAY_HALF, an addition of a number, or a product with one, that keeps nothing of it.
    ANY_HALF = MAY_HALF | HALF | BY_NUMBER

    # Python's flag arithmetic is slow enough to show in trace times.
    def __or__(self, other: int) -> Use:
        return _FLAGS[int.__or__(self, other)]

    def __and__(self, other: int) -> Use:
        return _FLAGS[int.__and__(self, other)]

    def __bool__(self) -> bool:
        return int.__bool__(self)

    __hash__ = int.__hash__

    def without(self, other: Use) -> Use:
        """These uses without those of `other`."""
        return _FLAGS[int.__and__(self, 1023 - other)]


_FLAGS = [Use(i) for i in range(1024)]
RESULT = Use.READ | Use.FLOAT | Use.RETURNED


class Uses(NamedTuple):
    """The uses of a jaxpr's values, the listing of each equation, and the uses of its inputs."""

    of: dict[Any, Use]
    listings: tuple[Listing, ...]
    inputs: tuple[Use, ...]


_cache: weakref.WeakKeyDictionary[Any, dict[Any, Uses]] = weakref.WeakKeyDictionary()


def uses(jaxpr: Any, wanted: tuple[Use, ...], setting: Setting) -> Uses:
    """The uses of each value of a jaxpr, given the uses of its outputs."""
    jaxpr = compat.open_jaxpr(jaxpr).jaxpr
    known = _cache.setdefault(jaxpr, {})
    key = (wanted, setting)
    if key not in known:
        known[key] = _uses(prepared(jaxpr, setting).jaxpr, wanted, setting)
    return known[key]


STREAM_ADDITION = Listing(Op.DENY, "residual stream")
GATED = Listing(Op.DENY, "gated state")
_REPEATED = Listing(Op.DENY, "steps of one map")
_EXACT = Listing(Op.DENY, f"{EXACT} an index or a decomposition reads it")
_INNER_PRODUCT = Listing(Op.DENY, "an inner product that no matmul reads: a sum")


def _uses(jaxpr: Any, wanted: tuple[Use, ...], setting: Setting) -> Uses:
    of: dict[Any, Use] = {}

    def add(v: Any, use: Use) -> None:
        if not isinstance(v, compat.Literal):
            of[v] = of.get(v, Use.NONE) | use

    for v, use in zip(jaxpr.outvars, wanted, strict=True):
        # A sub-jaxpr returns unused outputs too, so they must be computed.
        add(v, use | Use.READ)
    listings = []
    streams = _streams(jaxpr, setting)
    gated = frozenset() if setting.folded else gated_additions(jaxpr)
    for eqn in reversed(jaxpr.eqns):
        listing = classify(eqn, setting)
        outs = [of.get(v, Use.NONE) for v in eqn.outvars]
        if listing.entry is None and not listing.region:
            if listing.op is Op.INFER and eqn.outvars[0] in streams:
                multiplies = primitive(eqn.primitive.name).multiplies
                listing = GATED if multiplies else STREAM_ADDITION if setting.wide_stream else _REPEATED
            elif listing.op is Op.INFER and eqn.outvars[0] in gated:
                listing = GATED
            if listing.op is Op.ALLOW and setting.rules.level != "half":
                if outs[0] & Use.EXACT:
                    listing = _EXACT
                elif not outs[0] & Use.ANY_HALF and is_inner_product(eqn):
                    # A loss that picks values (`einsum("bn,bn->b", logits, one_hot)`), maybe beyond float16's range.
                    listing = _INNER_PRODUCT
        listings.append(listing)
        if not is_needed(eqn, outs):
            continue
        for v in closed_over(jaxpr, eqn) if listing.op is Op.ENTER and not setting.in_rule else ():
            add(v, Use.READ | Use.FLOAT if tracked(v) else Use.READ)
        for v, use in zip(eqn.invars, _of_operands(jaxpr, eqn, of, listing, setting), strict=True):
            add(v, use if tracked(v) else Use.READ)
    return Uses(of, tuple(reversed(listings)), tuple(of.get(v, Use.NONE) for v in jaxpr.invars))


def _streams(jaxpr: Any, setting: Setting) -> Container[Any]:
    """The results of the additions that run in float32 because others follow in the same sum."""
    if setting.folded:
        return frozenset()
    return residual_additions(jaxpr) if setting.wide_stream else repeated_updates(jaxpr)


def is_needed(eqn: Any, outs: Iterable[Use]) -> bool:
    """Whether an equation is in the rewritten program, given the uses of its outputs."""
    return any(outs) or bool(eqn.effects) or _may_be_looked_for(eqn)


def _may_be_looked_for(eqn: Any) -> bool:
    """Whether an equation stays although nothing reads it, because a function of programs may look for it.

    K-FAC marks layers and losses with primitives of its own, and a checkpoint policy looks for names.
    """
    row = primitive(eqn.primitive.name)
    if row.op is Op.OPAQUE or row.label or not eqn.outvars:
        return True
    return any(_may_be_looked_for(inner) for sub in sub_jaxprs(eqn) for inner in sub.opened.eqns)


def _of_operands(jaxpr: Any, eqn: Any, of: Mapping[Any, Use], listing: Listing, setting: Setting) -> Sequence[Use]:
    outs = [of.get(v, Use.NONE) for v in eqn.outvars]
    if listing.op is Op.ENTER:
        inside = setting.inside(eqn, listing.region)
        inner = setting.higher_order[eqn.primitive.name].uses(eqn, tuple(outs), inside)
        # A sub-jaxpr receives all operands, including those that it does not read.
        return [Use.READ | use for use in inner]
    use = _of_operand(listing, outs)
    row = primitive(eqn.primitive.name)
    by_number = listing.op is Op.INFER and _is_by_number(eqn, setting)
    if by_number and use & Use.MAY_HALF:
        use = Use.READ | Use.BY_NUMBER
    if eqn.primitive in FORMS and listing.op is Op.ALLOW:
        floats = eqn.params["options"].floats
        return [Use.READ | Use.FLOAT if i in floats else use for i in range(len(eqn.invars))]
    if listing.op is Op.INFER:
        if row.join:
            # A matmul that reads the joined array does not round its parts for others.
            use = Use.READ | outs[0].without(Use.HALF) | (Use.MAY_HALF if outs[0] & Use.HALF else Use.NONE)
        if follows_one_value(eqn) and not by_number:
            # A norm's output that reaches a matmul through an activation is half before the activation.
            use = use | outs[0] & Use.HALF
    out = functools.reduce(operator.or_, outs, Use.NONE)
    to_integers = listing.op is Op.CONVERT and eqn.params["new_dtype"].kind in "iu"
    # The step of an update is rounded as little as what it updates.
    steps = listing in (STREAM_ADDITION, _REPEATED)
    if (
        row.amplifies == "all"
        or (row.amplifies == "equals" and _of_one_shape(eqn))
        or (row.adds and cancels(jaxpr, eqn, _is_direct(eqn, of) or _is_recomputed(jaxpr, eqn, setting)))
        or to_integers
        or steps
        or (out & Use.AMPLIFIED and (not row.kernel or row.lookup or listing.op is Op.INFER))
    ):
        use = use | Use.AMPLIFIED
    # Numbers of fewer bits are no indices, but values that are quantised.
    indexes = to_integers and eqn.params["new_dtype"].itemsize >= FLOAT32.itemsize
    if row.decomposes or row.solve or indexes or (out & Use.EXACT and row.is_affine and row.op is not Op.ALLOW):
        use = use | Use.EXACT
    if row.backward.saves is Saves.SATURATING or (out & Use.SATURATED and _adds_number(eqn)):
        use = use | Use.SATURATED
    if listing is GATED or (out & Use.SUMMED and (row.scales or row.accumulates)):
        use = use | Use.SUMMED
    return [use, use | Use.AMPLIFIED] if row.amplifies == "second" else [use] * len(eqn.invars)


def _is_by_number(eqn: Any, setting: Setting) -> bool:
    """Whether rounding the operand before an operation with a number may lose more than rounding the result.

    What an addition cancels is lost (`softplus(h) - 0.7`). Exact factors scale a rounding with the value.
    """
    row, numbers = primitive(eqn.primitive.name), [v for v in eqn.invars if isinstance(v, compat.Literal)]
    return bool(row.adds and numbers) or (row.scales and not all(map(setting.represents, numbers)))


def _adds_number(eqn: Any) -> bool:
    return primitive(eqn.primitive.name).adds and any(isinstance(v, compat.Literal) for v in eqn.invars)


def _is_direct(eqn: Any, of: Mapping[Any, Use]) -> bool:
    """Whether an operation in half reads an equation's result, or an operand of it, directly or after moves."""
    return any(of.get(v, Use.NONE) & Use.HALF for v in (*variables(eqn.invars), *eqn.outvars))


def _is_recomputed(jaxpr: Any, eqn: Any, setting: Setting) -> bool:
    """Whether no float32 operand of an equation is kept for a backward pass.

    A GELU's `tanh` has another reader where the program itself differentiates it. A checkpoint keeps neither.
    """
    if not setting.recompute and not setting.in_rule:
        return setting.rules.residuals != "full"
    flow = dataflow(jaxpr)
    read_once = all(len(flow.readers.get(v, ())) == 1 and v not in flow.returned for v in variables(eqn.invars))
    return read_once and setting.rules.residuals != "full"


def _of_one_shape(eqn: Any) -> bool:
    first, second = (v.aval.shape for v in eqn.invars)
    return first == second != ()


def _of_operand(listing: Listing, outs: Sequence[Use]) -> Use:
    """The use of the operands of a first-order equation."""
    out = Use.NONE
    for use in outs:
        out = out | use
    if listing.op is Op.ALLOW or (listing.op is Op.CONVERT and listing.region in IN_HALF):
        return Use.READ | Use.HALF
    if listing.op is Op.MOVE:
        return Use.READ | out
    if listing.op is Op.INFER:
        return Use.READ | (Use.MAY_HALF if out & Use.ANY_HALF else Use.FLOAT)
    if listing.op is Op.WIDE:
        return Use.READ | Use.FLOAT | (Use.MAY_HALF if out & Use.ANY_HALF else Use.NONE)
    return Use.READ | Use.FLOAT


def follows_one_value(eqn: Any) -> bool:
    """Whether an equation reads only one float32 value, as relu does. The difference from a mean reads two."""
    return len({v for v in eqn.invars if not isinstance(v, compat.Literal) and tracked(v)}) == 1
