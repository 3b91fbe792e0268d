"""A backward pass that is part of the program computes again what costs little, instead of reading it.

The derivative of a GELU, a norm or a dropout reads several arrays that the forward pass computes from one.
`autocast(jax.grad(loss))` gets a program that hands all of them on, each of which would be stored, in half. Here the
equations that make them are repeated before the backward pass's equation that reads them. They then belong to its
rematerialisation region, which reads what they follow from, as that of `jax.grad(autocast(loss))` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from typing import Any

from mpjax.casting.setting import Setting, tracked
from mpjax.casting.streams import multiplies
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, dataflow, variables
from mpjax.program.derivative_rules import may_close_over_tracers
from mpjax.program.primitives import Op, primitive
from mpjax.program.source import REMATTED, is_backward, scopes

# A value is small beside a result of so many times its elements: the statistics of a norm are read, not computed again.
_SMALL = 8
_MOST = 3  # roots of a value


def is_cheap(eqn: Any) -> bool:
    """Whether an equation may be recomputed."""
    row = primitive(eqn.primitive.name)
    if eqn.effects or row.backward.kept:
        return False
    if row.lookup:  # Cheap if it selects elements, as a loss does by its labels, rather than repeating them.
        return compat.numel(eqn.outvars[0].aval) <= compat.numel(eqn.invars[0].aval)
    if row.call:
        return not any(eqn.params.get("donated_invars", ())) and all(map(is_cheap, inside_of_call(eqn)))
    return row.op not in (Op.ENTER, Op.OPAQUE)


def inside_of_call(eqn: Any) -> Sequence[Any]:
    """The equations of a call."""
    return compat.open_jaxpr(compat.call_jaxpr(eqn.params)).jaxpr.eqns


def with_recomputed(jaxpr: Any, setting: Setting) -> Any:
    """An open jaxpr in which the backward pass, if it has one, repeats cheap equations of the forward pass."""
    if not setting.recompute or setting.folded or setting.owners:  # Owners are known by equation.
        return jaxpr
    last = next((i for i, eqn in reversed([*enumerate(jaxpr.eqns)]) if is_backward(eqn)), -1)
    before, after = jaxpr.eqns[: last + 1], jaxpr.eqns[last + 1 :]  # An optimizer follows.
    eqns = _recomputed(jaxpr, before)
    return jaxpr.replace(eqns=[*eqns, *after]) if len(eqns) > len(before) else jaxpr


def is_repeated(eqn: Any) -> bool:
    """Whether the backward pass repeats an equation."""
    return REMATTED in scopes(eqn)


def _recomputed(jaxpr: Any, before: Sequence[Any]) -> list[Any]:
    flow, runs, kept = dataflow(jaxpr), _runs(before), {*jaxpr.invars, *jaxpr.constvars, *_kept(before)}
    roots = _roots(before, kept, {v for eqn in before if is_backward(eqn) for v in variables(eqn.invars) if tracked(v)})
    eqns: list[Any] = []
    repeated: dict[Any, Any] = {}  # in the current run; what is read in another would be stored

    def is_worth(v: Any, run: int) -> bool:
        """Whether a value of another run is repeated: to read what it follows from takes no more memory."""
        maker = flow.maker(v)
        if maker is None or v in kept or v in repeated or v in roots[v]:
            return False
        if runs[flow.place(maker)] == run or not tracked(v):
            return False
        of_inputs = bool(roots[v]) and all(flow.maker(w) is None for w in roots[v])
        return not of_inputs and sum(compat.numel(w.aval) for w in roots[v] - kept) <= compat.numel(v.aval)

    for i, eqn in enumerate(before):
        repeated = repeated if i and runs[i] == runs[i - 1] else {}
        if is_backward(eqn):
            for v in variables(eqn.invars):
                if is_worth(v, runs[i]):
                    kept.update(roots[v])
                    eqns.extend(_repetition(flow, roots[v], v, repeated))
            eqn = _reading(eqn, repeated)
        eqns.append(eqn)
    return eqns


def _repetition(flow: Dataflow, roots: Set[Any], v: Any, repeated: dict[Any, Any]) -> Iterator[Any]:
    """The equations that make a value from its roots, once more, apart from those that are `repeated` already."""
    makers = flow.made_by([v], lambda eqn: (w for w in _large(eqn) if w not in roots))
    for eqn in sorted(makers, key=flow.place):
        if eqn.outvars[0] not in repeated:
            renamed = [compat.new_variable(w) for w in eqn.outvars]
            yield compat.in_scope(_reading(eqn, repeated), REMATTED).replace(outvars=renamed)
            repeated.update(zip(eqn.outvars, renamed, strict=True))


def _reading(eqn: Any, renamed: dict[Any, Any]) -> Any:
    ins = [v if isinstance(v, compat.Literal) else renamed.get(v, v) for v in eqn.invars]
    return eqn if ins == list(eqn.invars) else eqn.replace(invars=ins)


def _runs(eqns: Sequence[Any]) -> list[int]:
    """The number of matmuls, also in loops and calls, up to each equation."""
    return [*itertools.accumulate(map(multiplies, eqns))]


def _kept(eqns: Sequence[Any]) -> set[Any]:
    """The values that a backward pass reads in any case: operands of its matmuls, masks."""
    read = ((eqn, variables(eqn.invars)) for eqn in eqns if is_backward(eqn))
    return {v for eqn, vs in read for v in vs if not tracked(v) or not is_cheap(eqn)}


def _roots(eqns: Sequence[Any], kept: set[Any], read: Set[Any]) -> dict[Any, frozenset[Any]]:
    """The large values from which each value follows by cheap equations, or itself.

    At most one is not kept, or two that are stored because the backward pass reads them, or what follows from them, as
    the factors of a product. Those are kept, too, in the end.
    """
    roots: dict[Any, frozenset[Any]] = {}
    stored: set[Any] = set()
    for eqn in eqns:
        found = frozenset[Any]().union(*(roots.get(v, {v}) for v in _large(eqn)))
        few = len(found) <= _MOST and len(found - kept) <= (2 if found - kept <= stored else 1)
        follows = few and _is_repeatable(eqn)
        for v in eqn.outvars:
            roots[v] = found if follows and not _is_small(v, eqn) else frozenset({v})
            if v in read and not is_backward(eqn) and len(roots[v]) == 1:
                stored.update(w for w in roots[v] if compat.numel(w.aval) <= compat.numel(v.aval))
    kept.update(stored)
    return roots


def _is_repeatable(eqn: Any) -> bool:
    """Whether an equation is cheap, and its results take as much memory as what it reads."""
    grows = all(compat.numel(v.aval) <= _size(eqn) for v in variables(eqn.invars))
    return grows and is_cheap(eqn) and not _closes_over(eqn)


def _closes_over(eqn: Any) -> bool:
    """Whether an equation, or one of a call, has a derivative rule that may close over a value of the program."""
    row = primitive(eqn.primitive.name)
    own = row.rule and may_close_over_tracers(eqn.params)
    return own or (row.call and any(map(_closes_over, inside_of_call(eqn))))


def _large(eqn: Any) -> Iterator[Any]:
    """The operands of an equation apart from small ones."""
    return (v for v in variables(eqn.invars) if not _is_small(v, eqn))


def _is_small(v: Any, eqn: Any) -> bool:
    return compat.numel(v.aval) * _SMALL <= _size(eqn)


def _size(eqn: Any) -> int:
    return max((compat.numel(v.aval) for v in eqn.outvars), default=0)
