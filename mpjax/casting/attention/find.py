"""Finds attention in a program: softmax(scale · Q Kᵀ + biases, masked) V, however it is written.

The search starts at each exponential. Forward, it follows the normalisation and the product with the values. Backward,
it follows masks, biases and scales to the product of queries and keys. It reads dataflow only, no names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mpjax.casting.attention.axes import Axis, Dims, Unfit, downstream, flat, fresh, joined, of_operand, upstream
from mpjax.casting.attention.flat import Inlined, changes_dtype
from mpjax.casting.attention.masks import HIDES, add_bias, add_mask
from mpjax.casting.attention.parts import Attention
from mpjax.casting.setting import tracked
from mpjax.program import compat
from mpjax.program.dataflow import variables
from mpjax.program.primitives import primitive
from mpjax.program.source import reason

# By name: a softmax has a form, in which the place of each operand counts.

_Note = Callable[[Attention], None]


class _Step(NamedTuple):
    """A value that may be the scores, or may lead back to them.

    Args:
        v, dims: The variable and its axes.
        factor: By how much it is multiplied until the exponential, or until the cap.
        cap: By how much the capped scores are multiplied until the exponential; 0 if no cap follows.
        trail: The equations after it, in reverse, each with what it does to the scores.
    """

    v: Any
    dims: Dims
    factor: float
    trail: tuple[Any, ...] = ()
    cap: float = 0.0


def attentions(flow: Inlined) -> Iterator[Attention]:
    """The attentions of a program without calls, in program order, with those that can't be fused."""
    for eqn in flow.eqns:
        if eqn.primitive.name == "exp" and eqn.outvars[0] in flow.readers and tracked(eqn.outvars[0]):
            try:
                attention = _attention(flow, eqn)
                if attention is not None:
                    _check_readers(flow, attention)
                    _check_dtypes(attention)
            except Unfit:
                continue
            except Exception as error:  # A program that this search did not foresee still runs as it is written.
                attention = Attention(eqn, eqn, why_not=f"the search failed: {reason(error)}")
            if attention is not None:
                yield attention


def _attention(flow: Inlined, exp: Any) -> Attention | None:
    """The attention around an exponential; None if there is none."""
    dims = fresh(exp.outvars[0].aval.shape)
    quotients = normalised(flow, exp, dims)
    if quotients is None:
        return None
    probabilities, keys, inside = quotients
    found = product(flow, probabilities, dims, keys)
    if found is None:
        return None
    values, side, of_p, after, changed = found
    attention = Attention(values, inside=[exp, *inside, *after], probabilities=changed)
    shift = _shift(flow, exp.invars[0], dims, keys)
    scores = exp.invars[0] if shift is None else shift.invars[0]
    if not _search_scores(flow, attention, _Step(scores, dims, 1.0), keys):
        return None
    if shift is not None:
        attention.inside += [shift, *flow.between(attention.scores.outvars[0], shift.invars[1])]
    add_values(attention, side, of_p)
    return attention


def normalised(flow: Inlined, exp: Any, dims: Dims) -> tuple[Any, tuple[Axis, ...], list[Any]] | None:
    """The probabilities, the axes over which they sum to one, and the equations of the normalisation."""
    (e,) = exp.outvars
    for total in flow.readers[e]:
        if total.primitive.name != "reduce_sum":
            continue
        axes = total.params["axes"]
        kept = joined(dim for d, dim in enumerate(dims) if d not in axes)
        for eqn, path in _reached(flow, total.outvars[0]):
            if eqn.primitive.name not in ("div", "mul") or e not in eqn.invars:
                continue
            other = eqn.invars[1] if eqn.invars[0] is e else eqn.invars[0]
            source, rest = flow.stripped(other, of_operand(other, dims))
            if eqn.primitive.name == "mul":
                reciprocal = flow.maker(source)
                if not _is_reciprocal(reciprocal):
                    continue
                source, rest = flow.stripped(reciprocal.invars[-1], rest)
            elif eqn.invars[0] is not e:
                continue
            if source is total.outvars[0] and joined(rest) == kept:
                return eqn.outvars[0], joined(dims[d] for d in axes), [total, *path, eqn]
    return None


def _reached(flow: Inlined, v: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The readers of a variable after moves and reciprocals, with the equations before them."""
    waiting: list[tuple[Any, tuple[Any, ...]]] = [(v, ())]
    while waiting:
        v, path = waiting.pop()
        for eqn in flow.readers.get(v, ()):
            yield eqn, path
            name = eqn.primitive.name
            if primitive(name).moves or name == "broadcast_in_dim" or _is_reciprocal(eqn):
                waiting.append((eqn.outvars[0], (*path, eqn)))


def product(
    flow: Inlined, probabilities: Any, dims: Dims, keys: tuple[Axis, ...]
) -> tuple[Any, int, Dims, list[Any], set[Any]] | None:
    """The product with the values.

    Returns:
        Its equation, the operand that holds the probabilities and their axes, the equations before it, and the
        variables that hold probabilities.
    """
    waiting: list[tuple[Any, Dims, tuple[Any, ...]]] = [(probabilities, dims, ())]
    known = {probabilities}
    for v, of_v, path in waiting:
        for eqn in flow.readers.get(v, ()):
            if eqn.primitive.name == "dot_general":
                side = 0 if eqn.invars[0] is v else 1
                summed = joined(of_v[d] for d in eqn.params["dimension_numbers"][0][side])
                if set(summed) == set(flat(keys)):
                    return eqn, side, of_v, list(path), {probabilities, *(each.outvars[0] for each in path)}
                (contracted, batch) = eqn.params["dimension_numbers"]
                ones = flow.constant(eqn.invars[1 - side])
                if ones is not None and (ones == 1).all() and not contracted[0] and len(batch[0]) == ones.ndim:
                    # A mask of heads that masks none.
                    free = [dim for d, dim in enumerate(of_v) if d not in batch[side]]
                    after = (*(of_v[d] for d in batch[side]), *free)
                    waiting.append((eqn.outvars[0], after, (*path, eqn)))
                continue
            out = eqn.outvars[0] if eqn.outvars else None
            if out is None or out in known:
                continue
            try:
                if not _changes(eqn):
                    after = downstream(eqn, of_v)
                elif out.aval.shape == v.aval.shape:
                    after = of_v
                else:
                    continue
            except Unfit:
                continue
            known.add(out)
            waiting.append((out, after, (*path, eqn)))
    return None


def _shift(flow: Inlined, v: Any, dims: Dims, keys: tuple[Axis, ...]) -> Any:
    """The subtraction of a value that is the same for all keys, which changes nothing; None without one."""
    eqn = flow.maker(v)
    if eqn is None or eqn.primitive.name != "sub" or len(variables(eqn.invars)) < 2:
        return None
    _, of_shift = flow.stripped(eqn.invars[1], of_operand(eqn.invars[1], dims))
    return None if set(joined(of_shift)) & set(flat(keys)) else eqn


def _search_scores(flow: Inlined, attention: Attention, start: _Step, keys: tuple[Axis, ...]) -> bool:
    """Follows the scores back to the product of queries and keys. Whether it is reached."""
    waiting, known = [start], {start.v}
    while waiting:
        step = waiting.pop()
        eqn = flow.maker(step.v)
        if eqn is None:
            continue
        if eqn.primitive.name == "dot_general":
            try:
                _add_scores(attention, eqn, step.dims, keys)
            except Unfit:
                continue
            attention.scores, attention.cap = eqn, abs(step.cap)
            attention.scale = step.factor * (step.cap or 1.0)
            attention.inside.append(eqn)
            trail = step.trail
            while trail:
                (after, note), trail = trail
                attention.inside.append(after)
                if note is not None:
                    note(attention)
            # From the scores on, so that the first reason is that of the first operation.
            return True
        before = [
            _before(step, eqn, *operand)
            for operand in _operands(flow, eqn, step.dims, step.factor)
            if not isinstance(operand[0], compat.Literal) and operand[0] not in known
        ]
        known.update(each.v for each in before)
        waiting += reversed(before)
    return False


def _before(step: _Step, eqn: Any, v: Any, dims: Dims, factor: float, note: _Note | None) -> _Step:
    """The operand of an equation as a step, given the step of its result."""
    cap = step.cap
    if eqn.primitive.name == "tanh":
        note = _refusal("its scores are capped twice") if cap else None
        factor, cap = 1.0, step.factor
    elif cap and (note is not None or eqn.primitive.name in ("add", "sub", "add_any", "select_n")):
        note = _refusal("its scores are masked, or have a bias, before they are capped")
    return _Step(v, dims, factor, ((eqn, note), step.trail), cap)


def _operands(flow: Inlined, eqn: Any, dims: Dims, factor: float) -> Iterator[tuple[Any, Dims, float, _Note | None]]:
    """The operands of an equation that may be the scores, with their factor and what the equation does to them."""
    name, ins = eqn.primitive.name, eqn.invars
    whole = [v for v in ins if v.aval.shape == eqn.outvars[0].aval.shape]
    if name in ("mul", "div"):
        for i, v in enumerate(ins[: 2 if name == "mul" else 1]):
            if v in whole:
                scale = flow.scalar(ins[1 - i])
                if scale is None or not math.isfinite(scale) or scale == 0:
                    yield v, dims, factor, _refusal("its scores are not multiplied by one constant number")
                else:
                    yield v, dims, factor * (scale if name == "mul" else 1 / scale), None
    elif name == "neg":
        yield ins[0], dims, -factor, None
    elif name in ("add", "sub", "add_any"):
        for i, v in enumerate(ins):
            if v in whole:
                sign, other = (-1.0 if name == "sub" else 1.0), ins[1 - i]
                of_scores, of_other = (factor, sign * factor) if i == 0 else (sign * factor, factor)
                yield v, dims, of_scores, _bias(flow, other, dims, of_other)
    elif name == "select_n" and len(ins) == 3:
        for i in (1, 2):
            yield ins[i], dims, factor, _mask(flow, ins[0], ins[3 - i], i == 1, dims, factor)
    elif name == "tanh":
        yield ins[0], dims, factor, None
    elif name == "stop_gradient":
        yield ins[0], dims, factor, _refusal("its scores have no gradient")
    elif primitive(name).rule:
        for v in whole:
            yield v, dims, factor, _refusal("the program has a derivative rule of its own for its scores")
    elif name in ("max", "min", "clamp"):
        for v in whole:
            yield v, dims, factor, _refusal("its scores are clipped")
    elif len(ins) == 1 and ins[0].aval.size == eqn.outvars[0].aval.size:
        try:
            before = upstream(eqn, dims)
        except Unfit:
            return
        why = "the program fixes the dtype of its scores" if changes_dtype(eqn) else ""
        yield ins[0], before, factor, _refusal(why) if why else None


def _refusal(why: str) -> _Note:
    return lambda attention: attention.refuse(why)


def _bias(flow: Inlined, other: Any, dims: Dims, factor: float) -> _Note:
    return lambda attention: add_bias(flow, attention, other, of_operand(other, dims), factor)


def _mask(flow: Inlined, which: Any, other: Any, inverted: bool, dims: Dims, factor: float) -> _Note:
    number = flow.scalar(other)

    def note(attention: Attention) -> None:
        if number is None or not (number * np.sign(factor) <= HIDES and number * factor <= HIDES):
            attention.refuse("its masked scores are not below every float16")
        else:
            add_mask(flow, attention, which, of_operand(which, dims), inverted, number * factor)

    return note


def _add_scores(attention: Attention, scores: Any, out: Dims, keys: tuple[Axis, ...]) -> None:
    """Notes which axes are batch, queries and keys, and the axes of queries and keys.

    Raises:
        Unfit: The softmax is over other axes than the keys, or over a single key.
    """
    (contracted, batch) = scores.params["dimension_numbers"]
    count = len(batch[0])
    head = fresh(scores.invars[0].aval.shape[d] for d in contracted[0])
    rest = list(out[count:])
    operands = []
    for v, c, b in zip(scores.invars, contracted, batch, strict=True):
        free = iter([rest.pop(0) for _ in range(len(v.aval.shape) - len(c) - len(b))])
        operands.append(
            tuple(
                head[c.index(d)] if d in c else out[b.index(d)] if d in b else next(free)
                for d in range(len(v.aval.shape))
            )
        )
    keys, common = flat(keys), joined(out[:count])
    frees = [tuple(a for a in joined(d) if a not in common and a not in joined(head)) for d in operands]
    if keys and set(keys) == set(frees[1]):
        q, k = 0, 1
    elif keys and set(keys) == set(frees[0]):
        q, k = 1, 0
    else:
        raise Unfit
    attention.batch, attention.queries, attention.keys, attention.head = common, frees[q], keys, joined(head)
    attention.parts = ((scores.invars[q], operands[q]), (scores.invars[k], operands[k]))


def add_values(attention: Attention, side: int, of_p: Dims) -> None:
    """Notes the axes of the values and of the result."""
    (contracted, batch) = attention.values.params["dimension_numbers"]
    v = attention.values.invars[1 - side]
    if set(joined(of_p[d] for d in batch[side])) != set(flat(attention.batch)):
        attention.refuse("its keys and values have different batches")
    width = fresh(v.aval.shape)
    c, b = contracted[1 - side], batch[1 - side]
    of_v = tuple(
        of_p[contracted[side][c.index(d)]] if d in c else of_p[batch[side][b.index(d)]] if d in b else width[d]
        for d in range(len(v.aval.shape))
    )
    frees = [
        [dim for d, dim in enumerate(of) if d not in contracted[i] and d not in batch[i]]
        for i, of in enumerate((of_p, of_v) if side == 0 else (of_v, of_p))
    ]
    attention.out = (*(of_p[d] for d in batch[side]), *frees[0], *frees[1])
    attention.width = joined(dim for d, dim in enumerate(of_v) if d not in c and d not in b)
    if math.prod(a.size for a in attention.width) != math.prod(a.size for a in attention.head):
        attention.refuse("its values have another head size than its keys")
    attention.parts = (*attention.parts, (v, of_v))


def _check_readers(flow: Inlined, attention: Attention) -> None:
    """Refuses an attention whose scores or probabilities something else reads, or changes."""
    inside = {id(eqn) for eqn in attention.inside} | {id(attention.values)}
    results = {v for eqn in attention.inside for v in eqn.outvars}
    if not results.isdisjoint(each.v for each in attention.added):
        attention.refuse("its scores are read by its mask or bias too")
    for eqn in attention.inside:
        for v in eqn.outvars:
            what = "probabilities" if v in attention.probabilities else "scores"
            if v in flow.returned:
                attention.refuse(f"its {what} are returned")
            for reader in flow.readers.get(v, ()):
                if id(reader) in inside:
                    continue
                if "jvp(" in str(reader.source_info.name_stack):
                    attention.refuse(
                        "the program contains its gradient already; put autocast inside the function that is "
                        "differentiated"
                    )
                attention.refuse(f"its {what} are read by {reader.primitive.name} too")
    changes = [eqn for eqn in attention.inside if attention.probabilities & set(variables(eqn.invars))]
    changes = [eqn for eqn in changes if _changes(eqn) or changes_dtype(eqn)]
    if any(flow.is_random(v) for eqn in changes for v in eqn.invars):
        attention.refuse("dropout on its probabilities")
    for eqn in changes:
        cast = "the program fixes the dtype of its probabilities"
        attention.refuse(cast if changes_dtype(eqn) else f"{eqn.primitive.name} changes its probabilities")


def _check_dtypes(attention: Attention) -> None:
    """Refuses an attention whose operands are not in float32."""
    for eqn in (attention.scores, attention.values):
        if not all(map(tracked, (*eqn.invars, *eqn.outvars))):
            attention.refuse("the program fixes its dtypes")
    if not all(tracked(bias.v) or not compat.is_inexact(bias.v.aval) for bias in attention.biases):
        attention.refuse("the program fixes the dtype of its bias")


def _changes(eqn: Any) -> bool:
    """Whether an equation changes probabilities by element. An attention with such a one is known, and not fused."""
    row = primitive(eqn.primitive.name)
    return row.elementwise or row.logic or row.rule


def _is_reciprocal(eqn: Any) -> bool:
    if eqn is None:
        return False
    name = eqn.primitive.name
    if name == "integer_pow":
        return bool(eqn.params["y"] == -1)
    return name == "div" and isinstance(eqn.invars[0], compat.Literal) and float(np.asarray(eqn.invars[0].val)) == 1
