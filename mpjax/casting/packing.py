"""`Rules(residuals="int8")` and `"float8"`: which half arrays the backward pass keeps in eight bits.

A matmul's operand that a region computes is not kept at all: it follows from what the region keeps. Reading it from
there costs no more than unpacking it.

An array is packed if all that its derivative is computed from reads it unpacked: matmuls, rematerialisation regions,
and calls of `jax.checkpoint` that store their inputs alone. An array that anything else keeps in half is kept once, in
half. So is one whose rounding a recomputed operation would amplify: the scores of a softmax, the argument of a
logarithm, what a pooling takes the maximum of. The last region of a program keeps nothing for long.

Of a state that a loop carries in float32 and multiplies in each step (the cell of an LSTM), and of a residual stream
that each layer normalizes, a region or a checkpoint keeps a half copy under any rules, which is packed too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.casting.attention.kernel import ATTENTION
from mpjax.casting.cancellation import cancels
from mpjax.casting.checkpointed import adds_to, stores_its_inputs
from mpjax.casting.cross_entropy.head import CROSS_ENTROPY
from mpjax.casting.lattice import FULL, HALF, Inferred, Level
from mpjax.casting.plan import Action, Step
from mpjax.casting.remat import Read, RematRegion, saved_by
from mpjax.casting.setting import Setting, tracked
from mpjax.kernels.packed import can_pack
from mpjax.program import compat
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import MATMULS, Primitive, primitive


def mark_gated(
    parts: Sequence[Step | RematRegion], values: Mapping[Any, Inferred], jaxpr: Any, setting: Setting
) -> None:
    """Sets `packs` of the regions and checkpoints of a plan that read a gated state: their derivatives read half."""
    for part in parts:
        if isinstance(part, RematRegion) or _stores_its_inputs(part):
            reads = [(i, v) for i, (v, storage) in enumerate(_reads(part)) if storage == FULL]
            states = [(i, v) for i, v in reads if not isinstance(v, compat.Literal) and v in values]
            part.packs = {
                i: setting.half.name
                for i, v in states
                if _is_state(part, v, values[v]) and not _amplified_in(part, v, jaxpr)
            }


def _is_state(part: Step | RematRegion, v: Any, value: Inferred) -> bool:
    if value.gated or isinstance(part, RematRegion):
        return value.gated
    return value.level in (Level.HALF, Level.FLOAT) and adds_to(part.eqn, list(part.eqn.invars).index(v))


def _reads(part: Step | RematRegion) -> Sequence[Read]:
    """What a part reads, as the indices in `packs` count it: of a checkpoint, the arrays that go in."""
    if isinstance(part, RematRegion):
        return part.ins
    if part.action is Action.ENTER:
        return [(part.invars[i], storage) for i, storage in part.inner.convention]
    return [*zip(part.invars, part.reads, strict=False)]


def formats_of_packs(part: Step | RematRegion) -> dict[Any, str]:
    """What the derivative of a part keeps in fewer bits, and in which format."""
    reads = _reads(part) if part.packs else ()
    return {reads[i][0]: format for i, format in part.packs.items() if format}


def mark_packed(parts: Sequence[Step | RematRegion], values: Mapping[Any, Inferred], jaxpr: Any, format: str) -> int:
    """Adds to `packs` of the steps and regions of a plan the operands that their derivatives read packed.

    Args:
        parts: The steps and regions, with the gated states that they keep in half.
        values: The inferred dtypes of the plan's values.
        jaxpr: The program.
        format: The name of the packing.

    Returns:
        The number of operands in the format.
    """
    kept = {v for part in parts for v in _kept_in_half(part, jaxpr)}
    for part in parts:
        reads = _reads(part) if part.packs else ()
        states = [i for i in part.packs if _fits(v := reads[i][0]) and v not in kept and _may_pack(part, v, jaxpr)]
        found = [i for i, v in _places(part, jaxpr) if v not in kept and _is_activation(v, values)]
        part.packs.update(dict.fromkeys((*states, *found), format))
    others = [part for part in parts if isinstance(part, RematRegion) or not _is_matmul(part)]
    stored = {v for part in others for v in formats_of_packs(part)}
    exact: set[Any] = set()
    for part in others:
        if isinstance(part, RematRegion):
            part.recomputed = frozenset(part.outvars) - stored
            exact |= part.recomputed if format not in part.packs.values() else set()
    for part in parts:
        reads = _reads(part) if part.packs and exact else ()
        part.packs.update((i, "") for i in part.packs if reads and reads[i][0] in exact)
    return sum(list(part.packs.values()).count(format) for part in parts)


def _is_activation(v: Any, values: Mapping[Any, Inferred]) -> bool:
    return tracked(v) and values[v].level >= Level.LOOKED_UP and _fits(v)


def _fits(v: Any) -> bool:
    """Whether the rows of an array make blocks, each on one device. Axes that are not explicit, XLA chooses."""
    is_split = compat.is_explicit(v.aval) and bool(v.aval.sharding.spec) and v.aval.sharding.spec[-1] is not None
    return can_pack(v.aval.shape) and not is_split


def _places(part: Step | RematRegion, jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """The operands that the derivative of a part reads in half, and may read unpacked."""
    if isinstance(part, RematRegion):
        for i, (v, storage) in enumerate(part.ins):
            if storage == HALF and not part.is_input[i] and _may_pack(part, v, jaxpr):
                yield i, v
    elif _is_matmul(part):
        for i, v in enumerate(part.eqn.invars[:2]):
            if part.reads[i] == HALF and i not in part.parameters and not isinstance(v, compat.Literal):
                yield i, v
    elif _stores_its_inputs(part):
        yield from (
            (i, v) for i, (v, storage) in enumerate(_reads(part)) if storage == HALF and _may_pack(part, v, jaxpr)
        )


def _kept_in_half(part: Step | RematRegion, jaxpr: Any) -> Iterator[Any]:
    """The values that the derivative of a part reads in half as they are."""
    if isinstance(part, RematRegion):
        for i, (v, storage) in enumerate(part.ins):
            if storage == HALF and not part.is_input[i] and not _may_pack(part, v, jaxpr):
                yield v
    elif part.action is Action.BIND and not _is_matmul(part):
        yield from (v for v, storage in saved_by(part) if storage == HALF)


def _is_matmul(step: Step) -> bool:
    plain = step.action is Action.BIND and step.half and not step.is_scaled
    return plain and step.eqn.primitive.name in MATMULS and step.eqn.primitive not in (ATTENTION, CROSS_ENTROPY)


def _stores_its_inputs(step: Step) -> bool:
    return step.action is Action.ENTER and stores_its_inputs(step.eqn)


def _may_pack(part: Step | RematRegion, v: Any, jaxpr: Any) -> bool:
    is_last = isinstance(part, RematRegion) and part.is_last
    return not is_last and not _amplified_in(part, v, jaxpr)


def _amplified_in(part: Step | RematRegion, v: Any, jaxpr: Any) -> bool:
    steps = part.eqns if isinstance(part, RematRegion) else [part]
    return _amplifies((step.eqn for step in steps), {v}, jaxpr)


def _amplifies(eqns: Iterable[Any], rounded: set[Any], jaxpr: Any) -> bool:
    """Whether an equation amplifies the rounding of values, before a sum averages it away."""
    for eqn in eqns:
        reads = [not isinstance(v, compat.Literal) and v in rounded for v in eqn.invars]
        if not any(reads):
            continue
        row = primitive(eqn.primitive.name)
        inner = [(sub.opened, sub.operands) for sub in sub_jaxprs(eqn)]
        # Values of a GELU are packed: `1 + tanh(h)` is small only beside what it is for other `h`.
        cancelled = row.adds and cancels(jaxpr, eqn, at_one_end=False)
        if row.amplifies == "all" or (row.amplifies == "second" and reads[1]) or cancelled:
            return True
        if _chooses(eqn, row):
            return True
        for opened, operands in inner:
            # In a loop, what is rounded may reach every part of the carry.
            inside = {
                w for w, i in zip(opened.invars, operands, strict=True) if row.loop or (i is not None and reads[i])
            }
            if _amplifies(opened.eqns, inside, opened):
                return True
            if row.call:
                results = zip(eqn.outvars, opened.outvars, strict=True)
                rounded.update(v for v, w in results if not isinstance(w, compat.Literal) and w in inside)
        if not row.call and (inner or not row.kernel):
            rounded.update(eqn.outvars)
    return False


def _chooses(eqn: Any, row: Primitive) -> bool:
    """Whether it compares elements with others, or with another number than 0: a maximum, a pooling, a threshold."""
    if row.chooses or (row.kernel and row.elements):
        return True
    compares = row.compares or (row.pointwise and row.elements == "all")  # A select's choice is made before it.
    return compares and sum(not _is_zero(v) for v in eqn.invars) > 1


def _is_zero(v: Any) -> bool:
    return isinstance(v, compat.Literal) and not np.any(v.val)
