"""What a program updates, `x = x + f(x)` or `x * f(x)`: a state that steps of one map share, or an input.

Such a value collects a rounding of each step if it is stored in half; the matmuls that read it do not need that. The
layers of a network have the same form, but each multiplies other parameters: see `streams`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax.casting.checkpointed import stores_its_inputs
from mpjax.casting.states import states_of
from mpjax.casting.streams import residual_additions
from mpjax.program import compat
from mpjax.program.dataflow import dataflow, once_per_jaxpr, variables
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import SubJaxpr, sub_jaxprs
from mpjax.program.primitives import MATMULS, Op, primitive

# By name: matmuls and convolutions have different parameters; a divisor is no term.


class Added(enum.IntEnum):
    """What was added to a value that a sum contains."""

    NOTHING = 0
    FACTOR = 1  # Nothing, but it was multiplied by what does not follow from it.
    TERM = 2
    STEP = 3  # A multiple by a number, such as a learning rate.


Product = tuple[int | None, frozenset[int]]


class Contents(NamedTuple):
    """What a value contains and depends on.

    Args:
        terms: The inputs that it follows from element by element, in a sum or product or otherwise, and what was added
            to each.
        inputs: The inputs that it depends on.
        number: Whether it is a number, or one in each element.
        scaled: Whether it is a multiple by a number.
        products: The products, as of `Summary`, that it depends on.
    """

    terms: Mapping[int, Added] = {}
    inputs: frozenset[int] = frozenset()
    number: bool = False
    scaled: bool = False
    products: frozenset[Product] = frozenset()

    @property
    def input(self) -> int | None:
        """The input that it is a function of, if it depends on one alone."""
        return next(iter(self.inputs)) if len(self.inputs) == 1 else None


class Summary(NamedTuple):
    """What the outputs of a jaxpr contain, and the pairs that its matmuls multiply.

    Args:
        outs: The contents of the outputs.
        products: For each matmul that maps a value: the input of which its other operand is a function, None for
            several, and the inputs that the value depends on.
    """

    outs: tuple[Contents, ...]
    products: tuple[Product, ...]


@once_per_jaxpr
def summary(jaxpr: Any) -> Summary:
    """What each output of a jaxpr contains, through sums, moves, joins, products with numbers and sub-jaxprs."""
    inputs = {v: Contents({i: Added.NOTHING}, frozenset((i,))) for i, v in enumerate(jaxpr.invars)}
    products: list[Product] = []

    def contents(v: Any, known: Contents) -> Contents:
        return known._replace(number=known.number or not compat.is_shaped(v.aval) or compat.numel(v.aval) == 1)

    def rule(eqn: Any, operands: Sequence[Contents]) -> Sequence[Contents]:
        read = list(map(contents, eqn.invars, operands))
        if primitive(eqn.primitive.name).op is Op.ENTER:
            return _through(eqn, read, products)
        own = _products(eqn, read[:2]) if eqn.primitive.name in MATMULS else []
        products.extend(own)
        behind = frozenset(own).union(*(x.products for x in read))
        return [_result(eqn, read, out)._replace(products=behind) for out in eqn.outvars]

    env = dict.fromkeys(jaxpr.constvars, Contents()) | inputs
    outs = evaluate(jaxpr, env, rule, constant=lambda literal, eqn: Contents())
    return Summary(tuple(map(contents, jaxpr.outvars, outs)), tuple(products))


def _products(eqn: Any, operands: Sequence[Contents]) -> list[Product]:
    """The pairs of a matmul. A vector for each element of a batch is no map: it has no dimension of its own."""
    maps = [True, True]
    if eqn.primitive.name == "dot_general":
        contracted, batch = eqn.params["dimension_numbers"]
        maps = [len(v.aval.shape) > len(c) + len(b) for v, c, b in zip(eqn.invars, contracted, batch, strict=True)]
    pairs = zip(operands, reversed(operands), maps, strict=True)
    return [(x.input, other.inputs) for x, other, is_map in pairs if is_map]


def _result(eqn: Any, read: Sequence[Contents], out: Any) -> Contents:
    row = primitive(eqn.primitive.name)
    inputs = frozenset().union(*(x.inputs for x in read))
    arrays = [x for x in read if not x.number]
    if row.op is Op.OPAQUE:  # An operation of another library may pass on any array of this shape.
        passed = [
            x.terms
            for x, v in zip(read, eqn.invars, strict=True)
            if getattr(v.aval, "shape", None) == getattr(out.aval, "shape", ())
        ]
        return Contents(_merged(passed, Added.NOTHING), inputs)
    if not arrays:
        return Contents(inputs=inputs, number=row.elementwise or row.moves or row.whole or row.exact)
    if row.scales and len(arrays) > 1:
        # What decays, `decay * state + new`, is still a sum.
        multiplied = arrays[:1] if eqn.primitive.name == "div" else arrays
        terms = _merged([x.terms for x in multiplied], Added.NOTHING)
        own = {i: Added.TERM for i in terms if any(i in x.inputs and i not in x.terms for x in arrays)}
        return Contents(_merged([terms, own], Added.FACTOR), inputs)
    scales = row.scales
    moves = row.moves or row.whole
    if not (scales or moves or row.accumulates or row.join or row.overwrites or row.lookup or row.pointwise):
        return Contents(inputs=inputs)
    added = Added.FACTOR if scales else Added.NOTHING
    if (row.adds or (row.kernel and row.accumulates)) and len(arrays) > 1:
        added = Added.STEP if any(x.scaled for x in arrays) else Added.TERM
    first = arrays[0]
    scaled = (scales and len(read) > 1) or (first.scaled and len(arrays) == 1)
    return Contents(_merged([x.terms for x in arrays], added), inputs, scaled=scaled)


def _merged(parts: Iterable[Mapping[int, Added]], added: Added) -> dict[int, Added]:
    merged: dict[int, Added] = {}
    for terms in parts:
        for i, before in terms.items():
            merged[i] = max(merged.get(i, Added.NOTHING), before, added)
    return merged


def _through(eqn: Any, read: Sequence[Contents], products: list[Product]) -> list[Contents]:
    """What an equation's outputs contain, given those of its operands; adds the products inside."""
    outs = [Contents() for _ in eqn.outvars]
    for sub in sub_jaxprs(eqn):
        inside = summary(sub.jaxpr)

        def operand(i: int, sub: SubJaxpr = sub) -> Contents:
            number = sub.operands[i]
            return Contents() if number is None else read[number]

        def depends(inputs: frozenset[int]) -> frozenset[int]:
            return frozenset().union(*(operand(i).inputs for i in inputs))

        def mapped(pairs: Iterable[Product]) -> list[Product]:
            return [(None if i is None else operand(i).input, depends(others)) for i, others in pairs]

        products += mapped(inside.products)
        if len(inside.outs) != len(outs):  # the condition of a `while`
            continue
        for k, out in enumerate(inside.outs):
            terms = [_merged([operand(i).terms], added) for i, added in out.terms.items()]
            outs[k] = Contents(
                _merged([outs[k].terms, *terms], Added.NOTHING),
                outs[k].inputs | depends(out.inputs),
                scaled=out.scaled,
                products=outs[k].products.union(mapped(out.products), *(operand(i).products for i in out.inputs)),
            )
    return outs


def added_to(body: SubJaxpr, i: int) -> Added:
    """What the body of a loop adds to the `i`-th value of its carry, or to what it makes of it element by element.

    To multiply it by a function of it adds as well: `state * gate(state)` is `state + state * (gate(state) - 1)`.
    """
    changed = _changed(body, i)
    return changed if changed >= Added.TERM else Added.NOTHING


def _changed(body: SubJaxpr, i: int) -> Added:
    return summary(body.jaxpr).outs[i].terms.get(body.consts + i, Added.NOTHING)


def is_gated(body: SubJaxpr, i: int) -> bool:
    """Whether the body of a loop multiplies the `i`-th value of its carry, or its difference from another, by an array.

    Its own equations count, and those of checkpoints.
    """
    return _is_multiplied(body.opened, body.opened.invars[body.consts + i])


def _is_multiplied(jaxpr: Any, v: Any) -> bool:
    flow = dataflow(jaxpr)
    readers = list(flow.readers.get(v, ()))
    differences = [eqn.outvars[0] for eqn in readers if primitive(eqn.primitive.name).adds]
    readers += [eqn for w in differences for eqn in flow.readers.get(w, ())]
    inside = [(eqn, sub) for eqn in readers if stores_its_inputs(eqn) and v in eqn.invars for sub in sub_jaxprs(eqn)]
    return any(primitive(eqn.primitive.name).scales and len(variables(eqn.invars)) > 1 for eqn in readers) or any(
        _is_multiplied(sub.opened, sub.opened.invars[list(eqn.invars).index(v)]) for eqn, sub in inside
    )


def is_one_map(body: SubJaxpr, i: int) -> bool:
    """Whether the iterations of a loop update the `i`-th value of its carry by one map.

    On the way to it, matmuls multiply the carry by loop invariants only. A `scan` over layers multiplies it by an array
    that is scanned.
    """
    factors = {k for k in _factors_of_carry(body, i) if k is not None}
    return any(k < body.consts for k in factors) and not any(k >= body.consts + body.carry for k in factors)


def is_recurrence(body: SubJaxpr, i: int) -> bool:
    """Whether a loop multiplies the `i`-th value of its carry or adds to it, and no matmul multiplies the carry before.

    Such are exponential moving averages, discounted returns, and the cotangents of what decays.
    """
    return bool(_changed(body, i)) and not _factors_of_carry(body, i)


def _factors_of_carry(body: SubJaxpr, i: int) -> set[int | None]:
    """The inputs by which matmuls multiply the carry of a loop on the way to its `i`-th value; None for several."""
    end = body.consts + body.carry
    products = summary(body.jaxpr).outs[i].products
    return {k for k, others in products if any(body.consts <= j < end for j in others)}


# Outside of loops: the additions of a program.


_REPEATS = 2  # A layer may well use a parameter twice; an unrolled loop uses it more often.


class _Steps(NamedTuple):
    """The steps that made a value of an earlier one.

    Args:
        factors: The inputs that their matmuls multiplied by.
        repeats: How many of them, in a row, multiplied by no other inputs than those before.
        sums: What they added to, and the sums.
    """

    factors: frozenset[Any] = frozenset()
    repeats: int = 0
    sums: tuple[Any, ...] = ()

    def then(self, factors: frozenset[Any], total: Any) -> _Steps:
        """With one step more."""
        repeats = self.repeats + bool(factors) if factors <= self.factors else 0
        return _Steps(self.factors | factors, repeats, (*self.sums, total))

    def joined(self, other: _Steps) -> _Steps:
        """The steps of two pieces of a value."""
        sums = dict.fromkeys((*self.sums, *other.sums))
        return _Steps(self.factors | other.factors, max(self.repeats, other.repeats), tuple(sums))


@once_per_jaxpr
def repeated_updates(jaxpr: Any) -> frozenset[Any]:
    """The residual additions that are steps of one map, as an unrolled loop has them.

    Between two such additions, matmuls multiply by no input that they did not multiply by in earlier steps. Each layer
    of a network has parameters of its own. A call may be a step as well.
    """
    additions, states = residual_additions(jaxpr), states_of(jaxpr)
    calls = {v: terms for eqn in jaxpr.eqns if primitive(eqn.primitive.name).call for v, terms in _added_inside(eqn)}
    if len(additions) + len(calls) <= _REPEATS:
        return frozenset()
    factors: dict[Any, frozenset[Any]] = {}  # the inputs that matmuls multiplied by, since the last addition
    steps: dict[Any, _Steps] = {}
    origin: dict[Any, Any] = {v: v for v in jaxpr.invars}
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        read = variables(eqn.invars)
        multiplied = frozenset().union(*(factors.get(v, frozenset()) for v in read), _factors(eqn, origin))
        if len(origins := {origin.get(v) for v in read}) == 1 and None not in origins:
            origin.update((v, _origin(eqn, i, *origins)) for i, v in enumerate(eqn.outvars))
        for out in eqn.outvars:
            terms = calls.get(out, read if out in additions else ())
            if terms:
                stream = min(terms, key=lambda v: len(factors.get(v, frozenset())))
                taken = steps.get(stream, _Steps()).then(multiplied - factors.get(stream, frozenset()), out)
                if taken.repeats >= _REPEATS:
                    found.update(taken.sums)
                    taken = taken._replace(sums=(out,))
                steps[out] = taken
                continue
            if states.root(out) is not out:
                steps[out] = functools.reduce(_Steps.joined, (steps[v] for v in read if v in steps), _Steps())
            if multiplied:
                factors[out] = multiplied
    return frozenset(found)


@once_per_jaxpr
def repeats_calls(jaxpr: Any) -> bool:
    """Whether calls of a program, or of a call in it, are steps of one map."""
    eqns = [eqn for eqn in jaxpr.eqns if primitive(eqn.primitive.name).call]
    return any(not repeated_updates(jaxpr).isdisjoint(eqn.outvars) for eqn in eqns) or any(
        repeats_calls(sub.jaxpr) for eqn in eqns for sub in sub_jaxprs(eqn)
    )


def _added_inside(call: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The results of a call that are sums of an operand and of what matmuls compute, with these operands."""
    (inner,) = sub_jaxprs(call)
    for v, out in zip(call.outvars, summary(inner.jaxpr).outs, strict=True):
        maps = any(k is not None for k, _ in out.products)
        terms = [call.invars[i] for i, added in out.terms.items() if added >= Added.TERM and maps]
        terms = [w for w in variables(terms) if w.aval.shape == v.aval.shape and len(v.aval.shape) > 1]
        if terms:
            yield v, terms


def _origin(eqn: Any, i: int, origin: Any) -> Any:
    """The origin of the `i`-th result of an equation that reads one input alone: the input, or which slice of it."""
    row = primitive(eqn.primitive.name)
    if row.op is not Op.MOVE or row.whole:
        return origin
    return origin, i, str(eqn.params), *(int(v.val) for v in eqn.invars if isinstance(v, compat.Literal))


def _factors(eqn: Any, origin: Mapping[Any, Any]) -> set[Any]:
    """The inputs of a program, or functions of one, by which the matmuls of an equation multiply."""
    if eqn.primitive.name in MATMULS:
        read = eqn.invars[:2]
    else:
        read = [
            eqn.invars[sub.operands[i]]
            for sub in sub_jaxprs(eqn)
            for i, _ in summary(sub.jaxpr).products
            if i is not None and sub.operands[i] is not None
        ]
    return {origin[v] for v in variables(read) if v in origin}


def is_step(jaxpr: Any, eqn: Any, v: Any) -> bool:
    """Whether a residual addition adds a multiple of a function of one of its operands to it, `x - rate * f(x)`."""
    if eqn.outvars[0] not in residual_additions(jaxpr):
        return False
    flow = dataflow(jaxpr)
    others = [w for w in variables(eqn.invars) if w is not v]
    makers = [maker for w in others if (maker := flow.maker(w)) is not None]
    return any(map(_scales, makers)) and flow.depends(others, v)


def _scales(eqn: Any) -> bool:
    return primitive(eqn.primitive.name).scales and any(compat.numel(v.aval) == 1 for v in eqn.invars)
