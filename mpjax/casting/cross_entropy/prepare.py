"""Writes a program's losses from statistics of rows, in place of their logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax.casting.attention.prepare import inlined
from mpjax.casting.classify import classify
from mpjax.casting.cross_entropy.apart import apart, copied, in_order, renamed
from mpjax.casting.cross_entropy.find import LossHead, losses
from mpjax.casting.cross_entropy.head import CROSS_ENTROPY, HeadOptions
from mpjax.casting.cross_entropy.labels import Layout
from mpjax.casting.cross_entropy.path import Factor, Path, is_head
from mpjax.casting.setting import Setting
from mpjax.kernels.cross_entropy import Head, Heads
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, live_equations
from mpjax.program.primitives import Op
from mpjax.program.source import reason

# By name: moves of rows have parameters of their own.

_LABELS = range(2, 17)  # Several labels of a row, but not many: each is compared with the whole vocabulary.
_REDUCTIONS: dict[str, Callable[..., Any]] = {"reduce_sum": jnp.sum, "reduce_max": jnp.max}


def without_logits(original: Any, setting: Setting) -> tuple[Any, tuple[tuple[Any, str], ...]]:
    """An open jaxpr without the logits of its losses, and the losses that stay, each with the reason."""
    whole = _with_one_label(inlined(original, lambda eqn: True)[0])
    split, products = apart(whole)
    jaxpr, refused = _fused(split, setting)
    if not products.isdisjoint(v for eqn in live_equations(jaxpr) for v in eqn.outvars):
        jaxpr, refused = _fused(whole, setting)
    changed = any(eqn.primitive is CROSS_ENTROPY for eqn in jaxpr.eqns)
    return (jaxpr if changed else original), tuple(refused)


def _with_one_label(jaxpr: Any) -> Any:
    """A program in which `jnp.take_along_axis` of several labels of a row gathers one after the other."""
    flow, eqns, names = Dataflow(jaxpr.eqns), list[Any](), dict[Any, Any]()
    of_logits = flow.after(*(eqn.outvars[0] for eqn in flow.eqns if is_head(flow, eqn)))
    for eqn in jaxpr.eqns:
        new = eqn.replace(invars=renamed(eqn.invars, names))
        axes = _axes_of_labels(eqn) if eqn.primitive.name == "gather" and eqn.invars[0] in of_logits else []
        if len(axes) == 1:
            names[eqn.outvars[0]] = _spliced(functools.partial(_one_by_one, eqn, *axes), new.invars, eqns, eqn)
        else:
            eqns.append(new)
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, names))


def _axes_of_labels(gather: Any) -> list[int]:
    """The axes of its indices along which a gather reads a few elements of one row."""
    numbers, shape = gather.params["dimension_numbers"], gather.invars[1].aval.shape[:-1]
    of_one = {*gather.params["slice_sizes"]} == {1} and len(numbers.start_index_map) == 1
    return [d for d, n in enumerate(shape) if of_one and d not in numbers.start_indices_batching_dims and n in _LABELS]


def _one_by_one(gather: Any, axis: int, x: Any, indices: Any) -> Any:
    outs = [gather.primitive.bind(x, part, **gather.params) for part in jnp.split(indices, indices.shape[axis], axis)]
    others = gather.params["dimension_numbers"].offset_dims
    return jnp.concatenate(outs, [d for d in range(outs[0].ndim) if d not in others][axis])


def _fused(jaxpr: Any, setting: Setting) -> tuple[Any, list[tuple[Any, str]]]:
    """A program whose losses are computed from statistics, and the losses that stay, each with the reason."""
    refused = []
    for matmul, found in list(losses(Dataflow(live_equations(jaxpr), jaxpr.outvars))):
        if isinstance(found, str):
            refused.append((matmul, found))
            continue
        listings = [classify(path.matmul, setting) for path in found.paths]
        why = next((listing.why for listing in listings if listing.op is not Op.ALLOW), None)
        if why is not None:
            refused.append((matmul, why))
            continue
        try:
            with compat.on_mesh_of(matmul.outvars[0].aval):
                jaxpr = _written(jaxpr, found)
        except Exception as error:  # A program that this code did not foresee still runs as it is written.
            refused.append((matmul, f"its form was not understood: {reason(error)}"))
    return jaxpr, refused


def _written(jaxpr: Any, found: LossHead) -> Any:
    """A program with a loss from statistics in place of its logits."""
    new: list[Any] = []
    rows = found.layout.rows
    like = found.paths[0].matmul

    def spliced(fun: Callable[..., Any], *operands: Any) -> Any:
        return _spliced(fun, operands, new, like)

    def label(y: Any, clipped: bool) -> Any:
        y = y.reshape(rows).astype(np.int32)
        return jnp.clip(y, 0, found.vocabulary - 1) if clipped else y

    of_heads, contracted = [], []
    for i, path in enumerate(found.paths):
        arrays, dims = _operands(path, spliced)
        for name, y in zip(Head(tuple(path.steps)).floats, arrays, strict=True):
            of_heads.append(spliced(lax.stop_gradient, y) if i in found.frozen or name in path.stopped else y)
        contracted.append(dims)
    labels = [spliced(functools.partial(label, clipped=clipped), y) for y, clipped in found.labels]
    heads = Heads(tuple(Head(tuple(path.steps)) for path in found.paths), len(labels))
    operands = [*of_heads, *labels]
    width = sum(operands[n].aval.shape[dims[0]] for n, dims in zip(heads.places("x"), contracted, strict=True))
    options = HeadOptions(heads, tuple(contracted), rows, found.vocabulary, width)
    outs = _results(options, operands)
    params = {"options": options}
    new.append(like.replace(primitive=CROSS_ENTROPY, invars=operands, outvars=[*outs], params=params))
    for i, path in enumerate(found.paths):
        if path.is_padded:
            for n, y in zip(heads.at(i), labels, strict=True):
                outs[n] = spliced(functools.partial(_at_padding, path), outs[n], y, *path.arrays)
    results = {}
    for eqn, result, given in found.reads:
        value = functools.partial(_value, found.layout, heads, len(outs), eqn, result)
        made: list[Any] = []
        results[eqn.outvars[0]] = _spliced(value, [*outs, *given], made, eqn)
        new += made
    inside = {*map(id, found.inside), *(id(eqn) for path in found.paths for eqn in path.inside)}
    rest = [eqn for eqn in jaxpr.eqns if id(eqn) not in inside]
    eqns = in_order([eqn.replace(invars=renamed(eqn.invars, results)) for eqn in (*rest, *new)])
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars, results))


def _operands(path: Path, spliced: Callable[..., Any]) -> tuple[list[Any], tuple[int, int]]:
    """The operands of a head, and the dimensions of rows and weights that are contracted."""
    x, w = path.matmul.invars
    ((i,), (j,)), _ = path.matmul.params["dimension_numbers"]
    if path.swapped:
        x, w, i, j = w, x, j, i
    if path.columns is not None:
        w = spliced(functools.partial(_columns, path, axis=1 - j), w)
    if i < x.aval.ndim - 1 or path.moves:
        x = spliced(lambda x: _moved(jnp.moveaxis(x, i, -1), path.moves), x)
    bias = [] if path.base is None else [spliced(functools.partial(_added, path, 0.0), *path.arrays)]
    factor = path.factor
    factors = [] if factor is None else [spliced(functools.partial(_factor, factor, path.moves), factor.value)]
    return [x, w, *bias, *factors], (x.aval.ndim - 1, j)


def _value(layout: Layout, heads: Heads, count: int, eqn: Any, result: Callable[..., Any], *arrays: Any) -> Any:
    """The result of an equation that reads logits, from their statistics and the values of rows that it takes."""
    out = result(heads.of_results(arrays[:count]), *arrays[count:])
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    out = out.astype(aval.dtype)
    if name in _REDUCTIONS:
        out = _REDUCTIONS[name](out, [layout.place_of(d) for d in eqn.params["axes"] if d != layout.axis])
    return out.reshape(aval.shape)


def _results(options: HeadOptions, operands: Sequence[Any]) -> list[Any]:
    """Variables of the results, which vary along the axes of a `shard_map` as the operands do."""

    def program(*scalars: Any) -> list[Any]:
        return [jnp.full(each.shape, sum(scalars)).astype(each.dtype) for each in options.results]

    traced = compat.trace(program, *(compat.scalar_of(v.aval, np.dtype(np.float32)) for v in operands))
    return [compat.new_variable(v) for v in compat.open_jaxpr(traced.jaxpr).jaxpr.outvars]


def _added(path: Path, base: float, *arrays: Any) -> Any:
    """A row after what is added to each row of logits, or written over it, given what it is before."""
    rest, row = iter(arrays), jnp.full(path.sizes, base, np.float32)
    added = path.added.make(*(row if v is path.base else next(rest) for v in path.added.of))
    return _columns(path, added.ravel())


def _columns(found: Path, y: Any, axis: int = 0) -> Any:
    """An array over the vocabulary without what is sliced off."""
    if found.columns is None or y.shape[axis] == found.vocabulary:
        return y
    return y[(slice(None),) * axis + (found.columns,)]


def _factor(factor: Factor, moves: Sequence[Any], y: Any) -> Any:
    """What logits are multiplied by, one number or one for each row, given what they are multiplied or divided by."""
    y = 1 / y if factor.how == "div" else y
    if compat.numel(factor.value.aval) == 1:
        return y.reshape(())
    return _moved(y.reshape(*factor.rows, 1), moves[factor.begin :]).reshape(-1)


def _at_padding(path: Path, logit: Any, label: Any, *arrays: Any) -> Any:
    """The logit at a label: that of padding is a number, after the steps that follow it, without a derivative."""
    row = _added(path, np.inf, *arrays)
    inside = (label >= 0) & (label < row.size) & (row[label] < 0)
    number = jnp.where(inside, row[label], 0)
    for kind, by in path.steps[path.steps.index(("bias", 0.0)) + 1 :]:
        number = number * by if kind == "scale" else by * jnp.tanh(number / by)
    return jnp.where(inside, number, logit)


def _moved(x: Any, moves: Iterable[Any]) -> Any:
    """Rows after moves of the logits. Features, which are last, stay there."""
    for eqn, axis, new in moves:
        params, before = eqn.params, Layout(eqn.invars[0].aval.shape, axis)
        if eqn.primitive.name == "transpose":
            rows = (before.place_of(d) for d in params["permutation"] if d != axis)
            x = lax.transpose(x, [*rows, x.ndim - 1])
        elif eqn.primitive.name == "slice":
            limits = (params[of] or [1] * x.ndim for of in ("start_indices", "limit_indices", "strides"))
            starts, ends, strides = ([*each[:axis], *each[axis + 1 :]] for each in limits)
            x = lax.slice(x, [*starts, 0], [*ends, x.shape[-1]], [*strides, 1])
        else:
            x = x.reshape(*Layout(eqn.outvars[0].aval.shape, new).rows, x.shape[-1])
    return x


def _spliced(fun: Callable[..., Any], operands: Sequence[Any], eqns: list[Any], like: Any) -> Any:
    """Adds the equations of a function of variables, in the scopes of another equation. Returns its result."""
    opened = compat.open_jaxpr(jax.make_jaxpr(fun)(*(compat.example(v.aval) for v in operands)))
    names = dict(zip(opened.jaxpr.invars, operands, strict=True))
    eqns += (compat.in_scopes_of(eqn, like) for eqn in copied(opened.jaxpr.eqns, names))
    (result,) = renamed(opened.jaxpr.outvars, names)
    return result
