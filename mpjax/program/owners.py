"""The modules of equations without a named scope (Flax NNX, plain JAX), or with one of only the class (Equinox).

An equation that reads a parameter belongs to the module that holds it, by the parameter's path in the first argument:
`layers/0` for `model.layers[0].weight`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any

from mpjax.program import compat
from mpjax.program.dataflow import dataflow, variables
from mpjax.program.evaluator import evaluate
from mpjax.program.graph import Owners, sub_jaxprs
from mpjax.program.primitives import matmul_flops, primitive

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def owners_of(jaxpr: Any, names: Sequence[str]) -> Owners:
    """The module paths of equations, by their `id`.

    Args:
        jaxpr: The program.
        names: The tree paths of its arguments in `(args, kwargs)`, as `[0][0].layers[0].weight`.
    """
    opened = compat.open_jaxpr(jaxpr).jaxpr
    owners: dict[int, str] = {}
    _note_readers(opened, [_module(name) for name in names], owners)
    _add_transposes(opened, owners)
    return Owners((key, path) for key, path in owners.items() if path)


def _add_transposes(jaxpr: Any, owners: dict[int, str]) -> None:
    """Adds the owners of parameter gradients, found by the input that they share with the matmul they transpose."""
    flow = dataflow(jaxpr)
    readers: dict[tuple[Any, str], dict[str, None]] = {}
    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [flow.source(v, _passes_on) for v in variables(eqn.invars)]
        for inner in sub_jaxprs(eqn):
            _add_transposes(inner.opened, owners)
        if not matmul_flops(eqn):
            continue
        if "transpose(" not in str(eqn.source_info.name_stack):
            for v in inputs if id(eqn) in owners else ():
                readers.setdefault((v, name), {})[owners[id(eqn)]] = None
        elif id(eqn) not in owners:
            for owned in filter(None, (readers.get((v, name)) for v in inputs)):
                path, *others = owned
                owners[id(eqn)] = functools.reduce(_common, others, path)
                break


def _passes_on(eqn: Any) -> bool:
    row = primitive(eqn.primitive.name)
    return row.moves or row.whole


def _module(name: str) -> str:
    """The path of the module that holds a parameter of the first argument.

    Example:
        >>> _module("[0][0].layers[0].weight"), _module("[0][0]['w']"), _module("[0][1]['x']['y']")
        ('layers/0', '', '')
    """
    keys = ["".join(groups) for groups in _KEYS.findall(name)]
    return "/".join(keys[2:-1]) if keys[:2] == ["0", "0"] else ""


def _common(a: str, b: str) -> str:
    pairs = zip(a.split("/"), b.split("/"), strict=False)
    return "/".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _note_readers(jaxpr: Any, paths: Sequence[str], owners: dict[int, str]) -> None:
    """Notes the owners of the equations that read parameters, directly or through casts and moves.

    Args:
        jaxpr: An open jaxpr.
        paths: For each input, the path of the module that holds it; empty for an input that is not a parameter.
        owners: Where to note them.
    """

    def rule(eqn: Any, operands: list[str]) -> list[str]:
        path, row = next(filter(None, operands), ""), primitive(eqn.primitive.name)
        inner = sub_jaxprs(eqn)
        for sub in inner:
            _note_readers(sub.opened, ["" if i is None else operands[i] for i in sub.operands], owners)
        if path and not inner:  # Several modules may call the same sub-jaxpr.
            owners[id(eqn)] = _common(owners.get(id(eqn), path), path)
        return [path if not inner and (row.moves or row.whole) else ""] * len(eqn.outvars)

    variables = dict.fromkeys(jaxpr.constvars, "") | dict(zip(jaxpr.invars, paths, strict=True))
    evaluate(jaxpr, variables, rule, constant=lambda literal, eqn: "")
