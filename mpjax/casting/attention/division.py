"""Divides an attention's result by the sums of its softmax, in place of its probabilities.

See `mpjax.kernels.softmax`, which computes it. The rest of the attention stays as the program has it: how scores are
made and masked, a dropout, the order of axes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.extend
import numpy as np

from mpjax.casting.attention.axes import Axis, Dims, flat, fresh, joined
from mpjax.casting.attention.find import add_values, normalised, product
from mpjax.casting.attention.flat import Inlined
from mpjax.casting.attention.layout import Layout, size_of
from mpjax.casting.attention.masks import HIDES
from mpjax.casting.attention.parts import Attention
from mpjax.casting.attention.prepare import inlined
from mpjax.casting.classify import classify
from mpjax.casting.setting import Setting, tracked
from mpjax.kernels import softmax
from mpjax.kernels.softmax import unfused
from mpjax.program import compat
from mpjax.program.primitives import Op, primitive

# By name: in a softmax, the place of each operand counts.

EXPONENTIALS = jax.extend.core.Primitive("softmax_exponentials")
EXPONENTIALS.multiple_results = True
AVERAGE = jax.extend.core.Primitive("softmax_product")

# What may be done to the maxima of rows: `jnp.max(..., initial=-inf)` takes the maximum with a number.
_KEEPS_ROWS = ("max", "stop_gradient", "broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims")
# XLA for GPUs reduces shorter rows in the kernel that reads them anyway.
SHORTEST = 129
# It computes the derivative of exponentials in the matmul's kernel, if their mean is subtracted there. The copies of
# values, and of a result's derivative, that are longer by 8 columns cost as much where rows are shorter than so many
# times these.
LONG = 4


class _Found(NamedTuple):
    """A softmax and its product with values.

    Args:
        top, exp, total, values: The equations of the maximum, of the exponentials, of their sum, and of the product.
        side: Which operand of the product the probabilities are.
        probabilities: The variable of the quotients.
        path: The equations between this and the product.
        layout: Brings the sums into the axes of the product.
    """

    top: Any
    exp: Any
    total: Any
    values: Any
    side: int
    probabilities: Any
    path: list[Any]
    layout: Layout


def divided_last(jaxpr: Any, setting: Setting) -> Any:
    """An open jaxpr that divides after products with values.

    Not for TPUs: XLA computes probabilities in the kernels that read them there, and would move more bytes.
    """
    rules = setting.rules
    plain = rules.level == "default" and rules.residuals != "full" and setting.scaled is None
    if not plain or compat.platform() == "tpu" or not any(map(_is_long, jaxpr.eqns)):
        return jaxpr
    # Dropouts by `jnp.where`, which is a call.
    jaxpr, original = inlined(jaxpr, lambda eqn: eqn.params.get("name") == "_where")[0], jaxpr
    flow = Inlined(jaxpr)
    replaced: dict[int, list[Any]] = {}
    for found in _softmaxes(flow):
        listings = [classify(eqn, setting) for eqn in (found.top, found.exp, found.total, *found.path, found.values)]
        if listings[-1].op is Op.ALLOW and not any(each.entry or each.region for each in listings):
            replaced |= _written(flow, found, setting.half)
    if not replaced:
        return original
    eqns = [new for eqn in jaxpr.eqns for new in replaced.get(id(eqn), [eqn])]
    return jaxpr.replace(eqns=eqns)


def _is_long(eqn: Any) -> bool:
    """Whether an equation computes the exponentials of rows that may be long enough."""
    if eqn.primitive.name != "exp" or not tracked(eqn.outvars[0]):
        return False
    return math.prod(n for n in eqn.outvars[0].aval.shape if isinstance(n, int)) >= SHORTEST


def _softmaxes(flow: Inlined) -> Iterator[_Found]:
    for eqn in flow.eqns:
        if _is_long(eqn) and eqn.outvars[0] in flow.readers:
            try:
                found = _softmax(flow, eqn)
            except Exception:  # A program that this search did not foresee still runs as it is written.
                continue
            if found is not None:
                yield found


def _softmax(flow: Inlined, exp: Any) -> _Found | None:
    """The softmax of an exponential, if it divides long rows, and only a product with values reads it."""
    dims = fresh(exp.outvars[0].aval.shape)
    quotients = normalised(flow, exp, dims)
    if quotients is None:
        return None
    probabilities, keys, sums = quotients
    top = _maximum(flow, exp, dims, keys)
    found = product(flow, probabilities, dims, keys)
    if found is None or top is None or size_of(keys) < SHORTEST:
        return None
    values, side, of_p, path, _ = found
    attention = Attention(values)
    add_values(attention, side, of_p)
    chain = [sums[-1], *path, values]
    pairs = itertools.chain(itertools.pairwise(sums), itertools.pairwise(chain))
    of_sums = tuple(dim for d, dim in enumerate(dims) if d not in sums[0].params["axes"])
    fits = (
        {id(eqn) for eqn in flow.readers[exp.outvars[0]]} == {id(sums[0]), id(sums[-1])}
        and all(_is_only_reader(flow, *pair) for pair in pairs)
        and all(_scales(flow, before.outvars[0], eqn) for before, eqn in itertools.pairwise(chain[:-1]))
        and all(map(tracked, (*values.invars, *values.outvars)))
        and 1 < size_of(attention.width) <= size_of(keys)
        and not flow.is_constant(values.invars[1 - side])
        and not _differ(exp, values)
        and set(joined(of_sums)) <= set(joined(attention.out))
    )
    layout = Layout.of(of_sums, [joined([d]) for d in attention.out]) if fits else None
    return layout and _Found(top, exp, sums[0], values, side, probabilities, path, layout)


def _maximum(flow: Inlined, exp: Any, dims: Dims, keys: Sequence[Axis]) -> Any:
    """The maximum over the keys that is subtracted from the argument of exponentials, which half then can hold."""
    shift = flow.maker(exp.invars[0])
    if shift is None or shift.primitive.name != "sub":
        return None

    top = flow.maker(flow.source(shift.invars[1], lambda eqn: eqn.primitive.name in _KEEPS_ROWS))
    if top is None or top.primitive.name != "reduce_max":
        return None
    whole = fresh(top.invars[0].aval.shape)
    reduced = joined(whole[d] for d in top.params["axes"])
    return top if _along(flow, top.invars[0], whole, reduced) == _along(flow, shift.invars[0], dims, keys) else None


def _along(flow: Inlined, v: Any, dims: Dims, axes: Sequence[Axis]) -> tuple[Any, list[bool]]:
    """A variable before moves, and which of its dimensions have some axes."""
    source, of_source = flow.stripped(v, dims)
    return source, [not set(flat(axes)).isdisjoint(joined([dim])) for dim in of_source]


def _is_only_reader(flow: Inlined, maker: Any, reader: Any) -> bool:
    (v,) = maker.outvars
    return v not in flow.returned and flow.readers.get(v, []) == [reader] and list(reader.invars).count(v) == 1


def _differ(exp: Any, values: Any) -> bool:
    """Whether values vary along other axes of a mesh than scores, or an axis is explicit."""
    avals = exp.outvars[0].aval, values.outvars[0].aval
    return len(set(map(compat.varying_axes_of, avals))) > 1 or any(map(compat.is_explicit, avals))


def _scales(flow: Inlined, v: Any, eqn: Any) -> bool:
    """Whether an equation moves a value or multiplies it by another, so that a factor of rows may follow it."""
    name = eqn.primitive.name
    if name == "select_n":  # A dropout's.
        zero = [x for x in eqn.invars[1:] if x is not v]
        return len(zero) == 1 and flow.scalar(zero[0]) == 0
    row = primitive(name)
    return (
        row.multiplies
        or (row.scales and eqn.invars[0] is v)
        or (row.moves and eqn.outvars[0].aval.dtype == v.aval.dtype)
    )


def _written(flow: Inlined, found: _Found, half: np.dtype) -> dict[int, list[Any]]:
    """The equations that take the place of others, by the `id` of these."""
    top, exp, total, values, side, probabilities, path, layout = found
    (e,), (sums,), (m,) = exp.outvars, total.outvars, top.outvars
    raw = compat.new_variable(m)
    apart = top.replace(primitive=unfused, invars=[raw], params={"long": True})

    of_rows, read, width = [sums], exp.invars, None
    fun: Any = functools.partial(softmax.exponentials, axes=total.params["axes"], half=half)
    if (centred := _centred(flow, found, half)) is not None:
        of_rows, (fun, read, width) = [sums, compat.new_variable(sums)], centred
    first = exp.replace(primitive=EXPONENTIALS, invars=read, outvars=[e, *of_rows], params={"fun": fun})
    eqns = {id(eqn): [_reading(eqn, probabilities, e)] for eqn in (*path, values)}
    (whole,) = eqns[id(values)]
    options = softmax.Average(side, tuple(values.params.items()), layout, width)
    params = {**values.params, "options": options}
    last = whole.replace(primitive=AVERAGE, invars=[*whole.invars, *of_rows], params=params)
    return eqns | {id(top): [top.replace(outvars=[raw]), apart], id(exp): [first], id(total): [], id(values): [last]}


def _centred(flow: Inlined, found: _Found, half: np.dtype) -> tuple[softmax.Centred, list[Any], tuple[int, int]] | None:
    """The exponentials whose derivative needs no pass over the scores, what they read, and the width of the values.

    None if it would not pay.
    """
    x, shift = flow.maker(found.exp.invars[0]).invars
    width, scores = _width(found.values, found.side), _scores(flow, x)
    moved = all(primitive(eqn.primitive.name).moves for eqn in found.path)
    if width is None or scores is None or not moved:
        return None
    axes = found.total.params["axes"]
    keys = math.prod(x.aval.shape[axis] for axis in axes)
    if keys < LONG * found.values.outvars[0].aval.shape[width[1]]:
        return None
    return softmax.Centred(axes, half, scores.factor, scores.number), [x, scores.v, shift], width


class _Scores(NamedTuple):
    """What scales and masks were applied to, with the factor, and the highest number that hides a score, if any does.

    The derivative for the scores is that for the arguments of the exponentials times the factor: a mask's derivative
    changes nothing, since the exponential of a hidden score is 0.
    """

    v: Any
    factor: float = 1.0
    number: float | None = None


def _scores(flow: Inlined, v: Any) -> _Scores | None:
    """The scores before scales and masks; None if they are no product of queries and keys."""
    found = _Scores(v)
    while (before := _before(flow, found)) is not None and before.v.aval.shape == v.aval.shape:
        found = before
    maker = flow.maker(flow.stripped(found.v, fresh(v.aval.shape))[0])
    return found if maker is not None and maker.primitive.name == "dot_general" else None


def _before(flow: Inlined, scores: _Scores) -> _Scores | None:
    """The scores before the equation that scales, shifts or masks them."""
    eqn = flow.maker(scores.v)
    name, ins = (eqn.primitive.name, eqn.invars) if eqn is not None else ("", [])
    pairs = [ins, ins[::-1]] if name in ("mul", "add") else [ins] if name in ("div", "sub") else []
    for x, other in pairs:
        scale = flow.scalar(other)
        if name in ("add", "sub") and not flow.reads_floats(other):
            return scores._replace(v=x)
        if name in ("mul", "div") and scale and math.isfinite(scale):
            return scores._replace(v=x, factor=scores.factor * (scale if name == "mul" else 1 / scale))
    for x, other in [ins[1:], ins[:0:-1]] if name == "select_n" and len(ins) == 3 else []:
        number = flow.scalar(other)
        if number is not None and (number := number * scores.factor) <= HIDES:
            return scores._replace(v=x, number=max(number, scores.number or number))
    return None


def _width(values: Any, side: int) -> tuple[int, int] | None:
    """The dimension of a product's values, and the one of its result, that only these have, if it is one."""
    contract, batch = values.params["dimension_numbers"]
    of_values = values.invars[1 - side].aval
    free = [d for d in range(of_values.ndim) if d not in (*contract[1 - side], *batch[1 - side])]
    if len(free) != 1 or values.primitive.name != "dot_general":
        return None
    return free[0], values.outvars[0].aval.ndim - 1 if side == 0 else len(batch[0])


def _reading(eqn: Any, before: Any, after: Any) -> Any:
    return eqn.replace(invars=[after if v is before else v for v in eqn.invars])
