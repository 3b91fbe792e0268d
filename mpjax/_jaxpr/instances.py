"""The module of an equation without a named scope (Flax NNX, plain JAX), or with one of only the class (Equinox).

An equation that reads a parameter belongs to the module that holds it, by the parameter's path in the first argument:
`layers/0` for `model.layers[0].weight`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpjax._jaxpr import compat
from mpjax._jaxpr.flops import matmul_flops
from mpjax._jaxpr.primitives import primitive
from mpjax._jaxpr.walk import inner_jaxprs

_KEYS = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


def owners_of(jaxpr: Any, names: Sequence[str]) -> dict[int, str]:
    """The module paths of equations, by their `id`.

    Args:
        jaxpr: The program.
        names: The tree paths of its arguments in `(args, kwargs)`, as `[0][0].layers[0].weight`.
    """
    opened = compat.open_jaxpr(jaxpr).jaxpr
    modules = {v: path for v, name in zip(opened.invars, names, strict=True) if (path := _module(name))}
    owners: dict[int, str] = {}
    for eqn, path in _readers(opened, modules):
        known = owners.setdefault(id(eqn), path)
        if known != path:  # Several modules call the same sub-jaxpr.
            owners[id(eqn)] = _common(known, path)
    _add_transposes(opened, owners)
    return {key: path for key, path in owners.items() if path}


def _add_transposes(jaxpr: Any, owners: dict[int, str]) -> None:
    """Adds the owners of parameter gradients, found by the input that they share with the matmul they transpose."""
    roots: dict[Any, Any] = {}
    readers: dict[tuple[Any, str], dict[str, None]] = {}
    for eqn in jaxpr.eqns:
        name, row = eqn.primitive.name, primitive(eqn.primitive.name)
        inputs = [roots.get(v, v) for v in eqn.invars if isinstance(v, compat.Var)]
        if (row.moves or row.whole) and inputs:
            roots.update(dict.fromkeys(eqn.outvars, inputs[0]))
        for inner in inner_jaxprs(eqn):
            _add_transposes(compat.open_jaxpr(inner).jaxpr, owners)
        if not matmul_flops(eqn):
            continue
        if "transpose(" not in str(eqn.source_info.name_stack):
            for v in inputs if id(eqn) in owners else ():
                readers.setdefault((v, name), {})[owners[id(eqn)]] = None
        elif id(eqn) not in owners:
            for found in filter(None, (readers.get((v, name)) for v in inputs)):
                path, *others = found
                owners[id(eqn)] = functools.reduce(_common, others, path)
                break


def _module(name: str) -> str:
    """The path of the module that holds a parameter of the first argument.

    Example:
        >>> _module("[0][0].layers[0].weight"), _module("[0][0]['w']"), _module("[0][1]['x']['y']")
        ('layers/0', '', '')
    """
    keys = ["".join(found) for found in _KEYS.findall(name)]
    return "/".join(keys[2:-1]) if keys[:2] == ["0", "0"] else ""


def _common(a: str, b: str) -> str:
    parts = []
    for x, y in zip(a.split("/"), b.split("/"), strict=False):
        if x != y:
            break
        parts.append(x)
    return "/".join(parts)


def _readers(jaxpr: Any, modules: Mapping[Any, str]) -> Iterator[tuple[Any, str]]:
    """The equations that read parameters, directly or through casts and moves, with the parameters' modules."""
    held = dict(modules)
    for eqn in jaxpr.eqns:
        paths = [held.get(v, "") if isinstance(v, compat.Var) else "" for v in eqn.invars]
        inner = inner_jaxprs(eqn)
        for sub in inner:
            opened = compat.open_jaxpr(sub).jaxpr
            given = _operands(eqn, sub, paths)
            if len(given) == len(opened.invars):
                yield from _readers(opened, {v: p for v, p in zip(opened.invars, given, strict=True) if p})
        path = next(filter(None, paths), "")
        if path and not inner:
            yield eqn, path
            row = primitive(eqn.primitive.name)
            if row.moves or row.whole:
                held.update(dict.fromkeys(eqn.outvars, path))


def _operands(eqn: Any, inner: Any, paths: list[str]) -> list[str]:
    """The module paths of a sub-jaxpr's inputs, given those of the equation's operands."""
    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        return paths[1:]
    if name == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        consts = paths[:first] if inner is params["cond_jaxpr"] else paths[first : first + second]
        return [*consts, *paths[first + second :]]
    return paths
