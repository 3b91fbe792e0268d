"""Shrinks a failing random program: removes and simplifies statements while it still fails in the same way."""

from __future__ import annotations

import ast
import copy
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from testing.random_programs.cases import Case

SIMPLEST = ("value", "grad", "vmap", "jvp", "outside_grad", "vmap_of_grad")


def simpler_programs(case: Case) -> Iterator[Case]:
    """Cases simplified by one change, largest changes first."""
    if case.rules != "default":
        yield dataclasses.replace(case, rules="default")
    for transform in SIMPLEST:
        if transform == case.transform:
            break
        yield dataclasses.replace(case, transform=transform)
    seen = {case.source}
    for tree in _edits(ast.parse(case.source)):
        try:
            source = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
        except Exception:
            continue
        if source not in seen:
            seen.add(source)
            yield dataclasses.replace(case, source=source)


def _bodies(tree: ast.AST) -> list[list[ast.stmt]]:
    return [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _edits(tree: ast.Module) -> Iterator[ast.Module]:
    """Copies of a program with one change each."""
    for i, body in enumerate(_bodies(tree)):
        for j in reversed(range(len(body) - 1)):
            smaller = copy.deepcopy(tree)
            del _bodies(smaller)[i][j]
            yield smaller
    for i, body in enumerate(_bodies(tree)):
        for j in reversed(range(len(body) - 1)):
            if isinstance(body[j], ast.FunctionDef):
                smaller = copy.deepcopy(tree)
                target = _bodies(smaller)[i][j]
                if isinstance(target, ast.FunctionDef) and target.decorator_list:
                    target.decorator_list = []
                    yield smaller
            elif isinstance(body[j], ast.Assign):
                yield from _simpler_value(tree, i, j)
        yield from _simpler_return(tree, i)


def _simpler_value(tree: ast.Module, i: int, j: int) -> Iterator[ast.Module]:
    statement = _bodies(tree)[i][j]
    assert isinstance(statement, ast.Assign)
    if isinstance(statement.value, ast.Name) or not isinstance(statement.targets[0], ast.Name):
        return
    names = dict.fromkeys(node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name))
    for name in names:
        if name not in ("jnp", "jax", "lax", "optax", "P", "MESH"):
            smaller = copy.deepcopy(tree)
            target = _bodies(smaller)[i][j]
            assert isinstance(target, ast.Assign)
            target.value = ast.Name(name, ast.Load())
            yield smaller


def _simpler_return(tree: ast.Module, i: int) -> Iterator[ast.Module]:
    last = _bodies(tree)[i][-1]
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
        return
    for k in range(len(last.value.elts)):
        smaller = copy.deepcopy(tree)
        end = _bodies(smaller)[i][-1]
        assert isinstance(end, ast.Return)
        if isinstance(end.value, ast.Tuple) and len(end.value.elts) > 1 and i == 0:
            del end.value.elts[k]
            yield smaller


def shrink(
    case: Any,
    fails: Callable[[Any], bool],
    simpler: Callable[[Any], Iterator[Any]] = simpler_programs,
    seconds: float = 30.0,
) -> Any:
    """The smallest case found that still fails.

    Args:
        case: A failing case.
        fails: Whether another case fails in the same way.
        simpler: The cases simplified by one change, largest changes first.
        seconds: Time limit of the search.
    """
    end = time.perf_counter() + seconds
    changed = True
    while changed and time.perf_counter() < end:
        changed = False
        for smaller in simpler(case):
            if time.perf_counter() > end:
                break
            if fails(smaller):
                case, changed = smaller, True
                break
    return case
