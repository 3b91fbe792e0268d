"""Divides an attention's result by the sums of its softmax, in place of its probabilities.

See `mpjax.kernels.softmax`, which computes it. The rest of the attention stays as the program has it: how scores are
made and masked, a dropout, the order of axes.
"""

from __future__ import annotations

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
from mpjax.casting.attention.parts import Attention
from mpjax.casting.attention.prepare import inlined
from mpjax.casting.classify import classify
from mpjax.casting.setting import Setting, tracked
from mpjax.kernels import softmax
from mpjax.kernels.maximum import unfused
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
    plain = rules.level == "default" and rules.residuals in ("auto", "half") and setting.scaled is None
    if not plain or compat.platform() == "tpu" or not any(map(_is_long, jaxpr.eqns)):
        return jaxpr
    # Dropouts by `jnp.where`, which is a call.
    jaxpr, original = inlined(jaxpr, lambda eqn: eqn.params["name"] == "_where")[0], jaxpr
    flow = Inlined(jaxpr)
    replaced: dict[int, list[Any]] = {}
    for found in _softmaxes(flow):
        listings = [classify(eqn, setting) for eqn in (found.top, found.exp, found.total, *found.path, found.values)]
        if listings[-1].op is Op.ALLOW and not any(each.entry or each.region for each in listings):
            replaced |= _written(found, setting.half)
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


def _written(found: _Found, half: np.dtype) -> dict[int, list[Any]]:
    """The equations that take the place of others, by the `id` of these."""
    top, exp, total, values, side, probabilities, path, layout = found
    (e,), (sums,), (m,) = exp.outvars, total.outvars, top.outvars
    raw = compat.new_variable(m)
    apart = top.replace(primitive=unfused, invars=[raw], params={"long": True})

    def exponentials(x: Any) -> Any:
        return softmax.exponentials(x, total.params["axes"], half)

    first = exp.replace(primitive=EXPONENTIALS, outvars=[e, sums], params={"fun": exponentials})
    eqns = {id(eqn): [_reading(eqn, probabilities, e)] for eqn in (*path, values)}
    (whole,) = eqns[id(values)]
    options = softmax.Average(side, tuple(values.params.items()), layout)
    last = whole.replace(primitive=AVERAGE, invars=[*whole.invars, sums], params={**values.params, "options": options})
    return eqns | {id(top): [top.replace(outvars=[raw]), apart], id(exp): [first], id(total): [], id(values): [last]}


def _reading(eqn: Any, before: Any, after: Any) -> Any:
    return eqn.replace(invars=[after if v is before else v for v in eqn.invars])
