"""The residual stream: a value that layer after layer adds to, `h = h + f(h)`, and may then normalize or scale.

Layers may also multiply it, `h = h * f(h)`.
"""

from __future__ import annotations

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mpjax.casting.setting import tracked
from mpjax.casting.states import (
    NORM,
    adds_arrays,
    adds_to_part,
    carried,
    changes_piece,
    is_gate,
    is_moved_whole,
    is_repeated,
    states_of,
)
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, dataflow, once_per_jaxpr, variables
from mpjax.program.graph import sub_jaxprs
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import BACKWARD, REMATTED, phase_of, scopes

# By name: a difference is a sum where gates decay it.

# With 24 additions, a ViT's or BERT's, their roundings in half make the error of the gradient 1.5 to 2 times that of
# casts by hand. Float32 would take 5 % of their step. Where each adds little, their roundings weigh more: up to 3 times
# with 24, and 2 with 12. So they count twice.
DEEP = 25
# Where matmuls read the sums themselves, not normalized, 8 roundings are 1.5 to 2.2 times by hand, 12 up to 2.8.
_PLAIN = 4
# With an activation after each of 3 additions, their roundings are 2.5 times by hand; of 8, 6 times.
_BENT = 13


@once_per_jaxpr
def residual_additions(jaxpr: Any) -> dict[Any, int]:
    """The results of the additions of a jaxpr that make a residual stream, and as how many each counts.

    One operand of such an addition has another consumer: the layer whose result is added to it, which has a matmul. The
    result, normalized or scaled or not, is added to again, or returned, as in the body of a scan over layers. Other
    additions lack one of these: a GELU's `x + 0.044715 x³` is multiplied by another array, a bias has no other
    consumer, and the moments of an optimizer have no layer.

    An addition to a sum that nothing else reads, as in `h + f(h) + g(h)`, counts as 0: they are rounded together. The
    products of a state that layers multiply alone are among the results.
    """
    flow, found = dataflow(jaxpr), states_of(jaxpr)
    readers: collections.Counter[Any] = collections.Counter()
    continued = {found.root(v) for v in flow.returned}
    additions, multiplied = [], _multiplied(jaxpr)
    for eqn in flow.eqns:
        if not eqn.outvars or eqn.outvars[0] in found.whole:
            continue
        of_piece = changes_piece(found, eqn)
        read = {found.root(v) if of_piece else found.whole.get(v, v) for v in variables(eqn.invars)}
        readers.update(read)
        if adds_arrays(eqn) or adds_to_part(flow, eqn):
            additions.append((eqn, read))
            continued |= read
    stream: dict[Any, int] = {}
    has_layer = _through_matmuls(flow, {v for _, read in additions for v in read if readers[v] > 1})
    for eqn, read in additions:
        (out,), is_repetition = eqn.outvars, REMATTED in scopes(eqn)  # of an addition whose layer reads the first sum
        branched = any(readers[v] > 1 and (is_repetition or has_layer(out, v)) for v in read)
        goes_on = not stream.keys().isdisjoint(read)
        if goes_on or (branched and out in continued):
            little = any(_is_little(jaxpr, eqn, v) for v in variables(eqn.invars))
            plain = phase_of(scopes(eqn)) != BACKWARD and not multiplied.isdisjoint(read)
            stream[out] = (_PLAIN if plain else 2 if little else 1) if branched else 0
    changed = [(v, eqn.outvars[0]) for eqn, _ in additions for v in variables(eqn.invars)]
    for v, out in (*changed, *((v, None) for v in flow.returned)):
        root = found.whole.get(v)
        counted = out if root in jaxpr.invars else root  # What the body of a layer changes, it may add to afterwards.
        if stream.get(counted) and any(_bends(flow, eqn, found.whole) for eqn in _changes(flow, v, found.whole)):
            stream[counted] = _BENT
    return stream | dict.fromkeys(_products_alone(jaxpr), 1)


def _through_matmuls(flow: Dataflow, states: Iterable[Any]) -> Callable[[Any, Any], bool]:
    """Whether a value depends on one of the `states` through a matmul."""
    bits = {v: 1 << i for i, v in enumerate(states)}
    behind, through = dict(bits), dict[Any, int]()
    for eqn in flow.eqns:
        depends, multiplied = (
            functools.reduce(operator.or_, (of.get(v, 0) for v in variables(eqn.invars)), 0) for of in (behind, through)
        )
        for v in eqn.outvars:
            behind[v] = depends | bits.get(v, 0)
            through[v] = depends if multiplies(eqn) else multiplied
    return lambda v, state: bool(through[v] & bits.get(state, 0))


def _changes(flow: Dataflow, v: Any, states: Mapping[Any, Any]) -> Iterator[Any]:
    """The equations by which a state became a value, the last one first."""
    root = states[v]
    while v is not None and v is not root:
        eqn = flow.maker(v)
        yield eqn
        v = next((w for w in variables(eqn.invars) if states.get(w, w) is root), None)


def _bends(flow: Dataflow, eqn: Any, states: Mapping[Any, Any]) -> bool:
    """Whether an equation maps each element of a state by a function that is not affine, even in pieces.

    Or multiplies it by what a layer computes from it, as a flow does.
    """
    row = primitive(eqn.primitive.name)
    if row.call:
        return any(
            _bends(dataflow(sub.jaxpr), inner, carried(sub.jaxpr))
            for sub in sub_jaxprs(eqn)
            for inner in sub.opened.eqns
        )
    arrays = [v for v in variables(eqn.invars) if v.aval.shape == eqn.outvars[0].aval.shape]
    roots = {states.get(v, v) for v in arrays}
    product = row.multiplies and (
        len(roots) == 1 < len(arrays) or any(_is_factor(flow, v, states.get(eqn.outvars[0]), states) for v in arrays)
    )
    return product or (row.pointwise and not row.is_affine and tracked(eqn.outvars[0]))


def _is_factor(flow: Dataflow, v: Any, state: Any, states: Mapping[Any, Any]) -> bool:
    """Whether a value follows from a state, if there is one, but is neither that state, nor a gate or a norm's."""
    if state is None or states.get(v, v) is state or not flow.depends([v], state):
        return False
    return not is_gate(flow, v) and not is_repeated(flow, v, NORM)


@once_per_jaxpr
def _multiplied(jaxpr: Any) -> frozenset[Any]:
    """The values that a matmul of a jaxpr, or of a call in it, reads as they are."""
    flow = dataflow(jaxpr)
    read = (variables(eqn.invars) for eqn in flow.eqns if primitive(eqn.primitive.name).op is Op.ALLOW)
    return frozenset(flow.source(v, is_moved_whole) for v in (*itertools.chain(*read), *_operands(flow, _multiplied)))


def _operands(flow: Dataflow, found: Callable[[Any], frozenset[Any]]) -> Iterator[Any]:
    """The operands of calls of which the call's jaxpr is found to read or to add to the input."""
    for eqn in flow.eqns:
        for sub in sub_jaxprs(eqn) if primitive(eqn.primitive.name).call else ():
            inside = found(sub.jaxpr)
            operands = zip(sub.opened.invars, eqn.invars, strict=True)
            yield from variables(v for w, v in operands if w in inside)


def _products_alone(jaxpr: Any) -> list[Any]:
    """The products of a state that layer after layer multiplies by what it computes from it, `h = h * f(h)`.

    There are several with no addition between, or one is what the body of a layer returns.
    """
    flow, found = dataflow(jaxpr), states_of(jaxpr)
    products: collections.defaultdict[Any, list[Any]] = collections.defaultdict(list)
    for eqn in flow.eqns:
        state = found.root(eqn.outvars[0]) if eqn.outvars and eqn.outvars[0] in found.whole else None
        if state is not None and primitive(eqn.primitive.name).multiplies:
            shape = eqn.outvars[0].aval.shape
            factors = [v for v in variables(eqn.invars) if v.aval.shape == shape and found.root(v) is not state]
            if not all(is_repeated(flow, v, NORM) for v in factors) and flow.depends(factors, state):
                products[state].append(eqn.outvars[0])
    layers = {found.root(v) for v in flow.returned if v in found.whole}.intersection(jaxpr.invars)
    return [v for state, each in products.items() if len(each) >= _GATES or state in layers for v in each]


@once_per_jaxpr
def normalized_sums(jaxpr: Any) -> frozenset[Any]:
    """The sums of a residual stream that a layer normalizes, or changes as in `carried`, before the next addition."""
    flow, additions, states = dataflow(jaxpr), residual_additions(jaxpr), carried(jaxpr)
    read = [v for eqn in flow.eqns if eqn.outvars and eqn.outvars[0] in additions for v in variables(eqn.invars)]
    goes_on = [*read, *flow.returned]
    return frozenset(states[v] for v in goes_on if v in states and flow.source(v, is_moved_whole) is not states[v])


@once_per_jaxpr
def added_to(jaxpr: Any) -> frozenset[Any]:
    """The values that a residual stream of a jaxpr, or of a call in it, adds to, which it may normalize before."""
    flow, additions, states = dataflow(jaxpr), residual_additions(jaxpr), carried(jaxpr)
    found = {states.get(v, v) for each in additions for v in variables(flow.maker(each).invars)}
    return frozenset(found.union(_operands(flow, added_to)))


def is_deep(jaxpr: Any) -> bool:
    """Whether a residual stream has so many additions that its roundings would add up."""
    return additions_in_a_row(jaxpr) >= DEEP


@once_per_jaxpr
def additions_in_a_row(jaxpr: Any) -> int:
    """The most additions of one residual stream, in all iterations of a `scan`."""
    additions, states = residual_additions(jaxpr), states_of(jaxpr)
    counts: dict[Any, int] = {}
    for eqn in jaxpr.eqns:
        before = max((counts.get(v, 0) for v in variables(eqn.invars)), default=0)
        row = primitive(eqn.primitive.name)
        added = additions.get(eqn.outvars[0]) if eqn.outvars else None
        if row.op is Op.ENTER:
            # Layers multiply; a loop that does not, such as that of a CTC loss, adds to no stream.
            inside = [sub.jaxpr for sub in sub_jaxprs(eqn) if not row.loop or has_matmuls(sub.jaxpr)]
            times = eqn.params.get("length", 1) if row.loop else 1
            added = times * max(map(additions_in_a_row, inside), default=0) or None
        if added is not None or (eqn.outvars and states.root(eqn.outvars[0]) is not eqn.outvars[0]):
            counts.update((v, before + (added or 0)) for v in eqn.outvars)
    return max(counts.values(), default=0)


_LITTLE = 0.5  # Factors that are at most this, gates, and learned ones, which begin so.


def _is_little(jaxpr: Any, addition: Any, v: Any) -> bool:
    """Whether a term of an addition is multiplied by a small number, learned scales, or a gate.

    The other term is little where this one, the state that it is added to, is multiplied by a large number (DeepNorm).
    """
    flow, states = dataflow(jaxpr), carried(jaxpr)
    product = flow.maker(flow.source(v, is_moved_whole))
    if product is None or not primitive(product.primitive.name).scales or len(product.invars) != 2:
        return False
    out, divides = product.outvars[0].aval, primitive(product.primitive.name).linear == "first"
    for factor, result in (product.invars, product.invars[::-1]):
        if isinstance(factor, compat.Literal):
            size = abs(float(np.max(factor.val))) or 1.0
            size = 1 / size if divides else size
            if size <= _LITTLE:
                return True
            others = [w for w in variables(addition.invars) if w is not v]
            if size >= 1 / _LITTLE and flow.depends(others, states.get(result, result)):
                return True
        elif result.aval.shape == out.shape and not divides:
            of_layer = result not in states  # A norm has scales too.
            if is_gate(flow, factor) or (of_layer and _is_given(flow, factor, compat.numel(out))):
                return True
    return False


def _is_given(flow: Dataflow, v: Any, size: int, depth: int = 12) -> bool:
    """Whether a value repeats a smaller one that follows from inputs alone, element by element."""
    eqn = flow.maker(v)
    if eqn is None or not depth:
        return eqn is None and compat.numel(v.aval) < size
    row, small = primitive(eqn.primitive.name), compat.numel(v.aval) < size
    passes = row.moves or row.whole or row.pointwise or row.op is Op.CONVERT
    # What a smaller one is a part of may be as large as the result.
    return passes and all(_is_given(flow, x, 2**62 if small else size, depth - 1) for x in variables(eqn.invars))


@once_per_jaxpr
def has_matmuls(jaxpr: Any) -> bool:
    """Whether a jaxpr, or a sub-jaxpr of it, has a matmul."""
    return any(map(multiplies, jaxpr.eqns))


def multiplies(eqn: Any) -> bool:
    """Whether an equation is a matmul, or has one."""
    return primitive(eqn.primitive.name).op is Op.ALLOW or any(has_matmuls(sub.jaxpr) for sub in sub_jaxprs(eqn))


_GATES = 3  # A layer may well have a gate; an unrolled loop has more.


@once_per_jaxpr
def gated_additions(jaxpr: Any) -> frozenset[Any]:
    """The additions to a state that gates multiply, `gate * state + new`, of an unrolled LSTM or a highway network.

    They are added to in turn, directly or times a gate, and gates multiply the state several times. So do the numbers
    by which a recurrence decays, `0.9 * state + new`, where the new value does not follow from the state.
    """
    flow, states = dataflow(jaxpr), carried(jaxpr)
    gates: dict[Any, int] = {}  # that multiplied a sum so far
    chain: dict[Any, tuple[Any, ...]] = {}  # the sums before it
    found: set[Any] = set()
    for eqn in flow.eqns:
        if not adds_arrays(eqn, ("add", "add_any", "sub"), axes=1):
            continue
        count, before = max(
            ((gates.get(v, 0) + gated, v) for v, gated in _added(flow, eqn, states)),
            key=lambda found: found[0],
            default=(0, None),
        )
        out = eqn.outvars[0]
        gates[out], chain[out] = count, (*chain.get(before, ()), out)
        if count >= _GATES:
            found.update(chain[out])
            chain[out] = ()
    return frozenset(found)


def _added(flow: Dataflow, eqn: Any, states: Mapping[Any, Any]) -> Iterator[tuple[Any, int]]:
    """What an addition adds, and by how many gates each is multiplied."""
    for v in variables(eqn.invars):
        yield states.get(v, v), 0
        product = flow.maker(flow.source(v, is_moved_whole))
        if product is not None and primitive(product.primitive.name).multiplies:
            for state, gate in (product.invars, product.invars[::-1]):
                if isinstance(state, compat.Literal):
                    continue
                root, others = states.get(state, state), [w for w in eqn.invars if w is not v]
                decays = compat.numel(gate.aval) == 1 and not flow.depends(others, root)
                if decays or is_gate(flow, gate):
                    yield root, 1
