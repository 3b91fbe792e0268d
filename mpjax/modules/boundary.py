"""Maps over the array arguments and results of a function, for arguments from any library.

Pytrees are mapped functionally. An NNX module has identity: changes that the function makes to it
(batch statistics, RNG counts) must reach the caller. Its variables are therefore changed in place during
the call, and restored afterwards.
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
    """Whether `x` is an NNX module (or other NNX graph object). Never imports Flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Pytree)


def contains_nnx_object(tree: Any) -> bool:
    """Whether a tree holds an NNX module at any depth."""
    return any(map(is_nnx_object, jax.tree.leaves(tree, is_leaf=is_nnx_object)))


class InPlaceChanges:
    """The NNX variables changed during a call, and their previous values."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, Any, Any]] = []

    def apply(self, fn: LeafMap, module: Any, path: str) -> None:
        """Applies `fn` in place to every variable of an NNX module, once to a shared one."""
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
        """Restores the variables that the function did not change itself."""
        for variable, new, old in reversed(self._changes):
            if variable.get_raw_value() is new:
                variable.set_raw_value(old)


def map_arrays(fn: LeafMap, tree: Any, changes: InPlaceChanges, prefix: str) -> Any:
    """Applies `fn` to every leaf of a tree. NNX modules in it are changed in place."""

    def visit(path: tuple[Any, ...], x: Any) -> Any:
        name = "/".join(part for part in (prefix, path_string(path)) if part)
        if not is_nnx_object(x):
            return fn(name, x)
        changes.apply(fn, x, name)
        return x

    return jax.tree_util.tree_map_with_path(visit, tree, is_leaf=is_nnx_object)


def with_boundary(fun: Callable[..., Any], enter: LeafMap, leave: LeafMap) -> Callable[..., Any]:
    """Wraps `fun`: applies `enter` to every leaf of its arguments, and `leave` to every leaf of its results."""

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
    """Maps over arguments. Paths start with the argument's position or keyword."""
    return (
        tuple(map_arrays(fn, arg, changes, str(i)) for i, arg in enumerate(args)),
        {key: map_arrays(fn, arg, changes, key) for key, arg in kwargs.items()},
    )
