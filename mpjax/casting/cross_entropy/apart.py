"""Gives a matmul of its own to each scale, layout or part of logits that a program reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpjax.casting.cross_entropy.labels import number_of, scalar_of
from mpjax.casting.cross_entropy.path import Path, Refused, is_head
from mpjax.casting.cross_entropy.repeated import mask_of
from mpjax.program import compat
from mpjax.program.dataflow import Dataflow, live_equations, variables
from mpjax.program.primitives import Op, primitive

# By name: a loss is found by what is done to its logits.

NORMALISING = ("exp", "reduce_sum", "log")


def apart(jaxpr: Any) -> tuple[Any, frozenset[Any]]:
    """A program with a matmul of its own for each scale, layout or part of logits that is read, and their products."""
    jaxpr = _with_one_argmax(_with_one_mask(jaxpr))
    flow = Dataflow(live_equations(jaxpr), jaxpr.outvars)
    copies: dict[int, tuple[list[Any], dict[Any, Any]]] = {}
    products: set[Any] = set()
    for matmul in (eqn for eqn in flow.eqns if is_head(flow, eqn)):
        head = Path(flow, matmul)
        with contextlib.suppress(Refused):
            v = head.logits()
            readers = flow.readers.get(v, [])
            differing = [eqn for eqn in readers if _differs(flow, eqn, v)]
            if len(readers) == 1 or not differing or not is_normalised(flow, v):
                continue
            products.add(matmul.outvars[0])
            for reader in differing[len(differing) == len(readers) :]:
                names: dict[Any, Any] = {}
                copies[id(reader)] = [*copied(head.inside, names)], {v: names[v]}
                products.add(names[matmul.outvars[0]])
    eqns = []
    for eqn in jaxpr.eqns:
        before, names = copies.get(id(eqn), ([], {}))
        eqns += [*before, eqn.replace(invars=renamed(eqn.invars, names))]
    return jaxpr.replace(eqns=eqns), frozenset(products)


def _with_one_mask(jaxpr: Any) -> Any:
    """A program that masks each array once, which `jax.nn.log_softmax(logits, where=mask)` masks twice."""
    flow = Dataflow(jaxpr.eqns)
    first: dict[Any, Any] = {}
    names: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "select_n":
            for x in variables(eqn.invars[1:]):
                key = x, *mask_of(flow, eqn, x)
                names[eqn.outvars[0]] = first.setdefault(key, eqn.outvars[0])
    return jaxpr.replace(eqns=[eqn.replace(invars=renamed(eqn.invars, names)) for eqn in jaxpr.eqns])


def _with_one_argmax(jaxpr: Any) -> Any:
    """A program whose argmax reads the logits that its loss reads, where one of the two divides them by a temperature.

    A positive factor does not change where logits are largest.
    """
    flow = Dataflow(live_equations(jaxpr), jaxpr.outvars)
    names: dict[int, dict[Any, Any]] = {}
    for matmul in (eqn for eqn in flow.eqns if is_head(flow, eqn)):
        with contextlib.suppress(Refused):
            v = Path(flow, matmul).logits()
            readers = flow.readers.get(v, [])
            scaled = {eqn.outvars[0]: eqn for eqn in readers if _is_positive_factor(flow, eqn, v)}
            best = {w: [eqn for eqn in flow.readers.get(w, ()) if eqn.primitive.name == "argmax"] for w in (v, *scaled)}
            others = [w for w in scaled if len(best[w]) < len(flow.readers.get(w, ())) or w in flow.returned]
            of_v = [eqn for eqn in readers if eqn not in (*best[v], *scaled.values())]
            if v in flow.returned or len(others) + bool(of_v) != 1:
                continue
            target = v if of_v else others[0]
            names |= {id(eqn): {w: target} for w, found in best.items() for eqn in found}
    eqns = [eqn.replace(invars=renamed(eqn.invars, names.get(id(eqn), {}))) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=in_order(eqns)) if names else jaxpr


def _is_positive_factor(flow: Dataflow, eqn: Any, logits: Any) -> bool:
    """Whether logits are multiplied or divided by a positive number."""
    name, others = eqn.primitive.name, [x for x in eqn.invars if x is not logits]
    divides = name == "div" and eqn.invars[0] is logits
    return (name == "mul" or divides) and len(others) == 1 and (number_of(flow, others[0]) or 0) > 0


def copied(eqns: Iterable[Any], names: dict[Any, Any]) -> Iterator[Any]:
    """Copies of equations, which read the variables of `names`; it gets new ones for their results."""
    for eqn in eqns:
        ins, outs = renamed(eqn.invars, names), [compat.new_variable(v) for v in eqn.outvars]
        names.update(zip(eqn.outvars, outs, strict=True))
        yield eqn.replace(invars=ins, outvars=outs)


def renamed(atoms: Sequence[Any], names: Mapping[Any, Any]) -> list[Any]:
    """Variables by their other names, and literals."""
    return [names.get(v, v) if isinstance(v, compat.Var) else v for v in atoms]


def _differs(flow: Dataflow, reader: Any, logits: Any) -> bool:
    """Whether a reader takes other rows than those of logits, or scales them."""
    scale = reader.primitive.name in ("mul", "div")
    others = [x for x in reader.invars if x is not logits]
    return reader.primitive.name in ("transpose", "slice") or (
        scale and all(number_of(flow, x) is not None or scalar_of(flow, x) is not None for x in others)
    )


def in_order(eqns: Sequence[Any]) -> list[Any]:
    """Equations in an order in which each value is made before it is read.

    Raises:
        ValueError: There is none, as for two losses that each have labels from the other's logits.
    """
    flow, most = Dataflow(eqns), sum(len(eqn.invars) for eqn in eqns)
    done: set[int] = set()
    order: list[Any] = []
    for eqn in eqns:
        waiting = [eqn]
        while waiting:
            top = waiting[-1]
            makers = map(flow.maker, variables(top.invars))
            needed = [maker for maker in makers if maker is not None and id(maker) not in done]
            if needed and id(top) not in done:
                if len(waiting) > most:
                    raise ValueError("its labels follow from logits that follow from it")
                waiting += needed
                continue
            waiting.pop()
            if id(top) not in done:
                done.add(id(top))
                order.append(top)
    return order


def is_normalised(flow: Dataflow, v: Any) -> bool:
    """Whether the logarithm of a sum of exponentials of a value is taken, before any matmul."""
    waiting, seen = [(v, 0)], set[Any]()
    while waiting:
        v, done = waiting.pop()
        for eqn in flow.readers.get(v, ()):
            name, now = eqn.primitive.name, done
            now += name == NORMALISING[now]
            if now == len(NORMALISING):
                return True
            if primitive(name).op is not Op.ALLOW:
                new = [(out, now) for out in eqn.outvars if (out, now) not in seen]
                seen.update(new)
                waiting += new
    return False
