"""Maps over the arrays that enter and leave a function, whatever library its arguments come from.

Pytrees are mapped functionally. An NNX module has identity: the changes that the function makes inside it
(batch statistics, RNG counts) must reach the caller. So its variables are changed in place for the time of
the call, and put back afterwards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from mpjax.policy import path_string

LeafMap = Callable[[str, Any], Any]  # (path, leaf) -> leaf


def is_nnx_object(x: Any) -> bool:
    """Whether `x` is an NNX module (or other NNX graph object); never imports Flax for it."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)


def contains_nnx_object(tree: Any) -> bool:
    """Whether a tree holds an NNX module at any depth."""
    return any(map(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object)))


class InPlaceChanges:
    """The NNX variables changed for the time of a call, and their values before."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, Any, Any]] = []

    def apply(self, fn: LeafMap, module: Any, path: str) -> None:
        """Applies `fn` to every variable of an NNX module, in place; a shared one once."""
        from flax import nnx

        variables = jax.tree_util.tree_leaves_with_path(module, is_leaf=lambda x: isinstance(x, nnx.Variable))
        seen = set()
        for variable_path, variable in variables:
            if not isinstance(variable, nnx.Variable) or id(variable) in seen:
                continue
            seen.add(id(variable))
            old = variable.get_raw_value()
            new = fn(f"{path}/{path_string(variable_path)}", old)
            if new is not old:
                variable.set_raw_value(new)
                self._changes.append((variable, new, old))

    def undo(self) -> None:
        """Puts back what the function left as it was; what it changed itself stays changed."""
        for variable, new, old in reversed(self._changes):
            if variable.get_raw_value() is new:
                variable.set_raw_value(old)


def map_arrays(fn: LeafMap, tree: Any, changes: InPlaceChanges, prefix: str) -> Any:
    """Applies `fn` to every leaf of a tree; NNX modules in it are changed in place."""

    def visit(path: tuple[Any, ...], x: Any) -> Any:
        name = "/".join(part for part in (prefix, path_string(path)) if part)
        if not is_nnx_object(x):
            return fn(name, x)
        changes.apply(fn, x, name)
        return x

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_nnx_object)


def with_boundary(fun: Callable[..., Any], enter: LeafMap, leave: LeafMap) -> Callable[..., Any]:
    """`fun` with `enter` applied to every leaf of its arguments and `leave` to its results'."""

    @functools.wraps(fun)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        changes = InPlaceChanges()
        args, kwargs = map_arguments(enter, args, kwargs, changes)
        try:
            out = fun(*args, **kwargs)
        finally:
            changes.undo()
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if is_nnx_object(x) else leave(path_string(path), x), out, is_leaf=is_nnx_object
        )

    return bounded


def map_arguments(
    fn: LeafMap, args: tuple[Any, ...], kwargs: dict[str, Any], changes: InPlaceChanges
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Maps over arguments; paths start with the argument's position or keyword."""
    return (
        tuple(map_arrays(fn, arg, changes, str(i)) for i, arg in enumerate(args)),
        {key: map_arrays(fn, arg, changes, key) for key, arg in kwargs.items()},
    )
