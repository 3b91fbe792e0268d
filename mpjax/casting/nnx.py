"""The NNX form of autocast: modules as arguments, whose state may change inside the function.

Imported only where an argument is an NNX object.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from mpjax.casting.regions import scopes_of_modules


def is_stateful(x: Any) -> bool:
    """Whether an argument is an NNX object, whose state the function may change."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def names(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """Converts tree paths of arrays in the arguments that `functional` returns to paths in `(args, kwargs)`."""
    leaves = jax.tree_util.tree_flatten_with_path((tuple(args), kwargs), is_leaf=is_leaf)[0]
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    stateful = [jax.tree_util.keystr(path) for path, leaf in leaves if is_stateful(leaf)]
    found = []
    for name in names:
        found_in = re.fullmatch(r"\[0\]\[([01])\]\[(\d+)\](.*)", name)
        assert found_in is not None, name  # the only form that `functional` produces
        which, index, rest = found_in.groups()
        found.append((paths if which == "1" else stateful)[int(index)] + rest.removesuffix(".value"))
    return found


def functional(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Converts a call with NNX objects to a call of a pure function of arrays.

    Returns:
        The pure function, its arguments, and a function that takes its result, writes the
        new state into the caller's objects, and returns the result of `fun`.
    """
    leaves, tree = jax.tree.flatten((tuple(args), kwargs), is_leaf=is_leaf)
    where = [i for i, leaf in enumerate(leaves) if is_stateful(leaf)]
    objects = tuple(leaves[i] for i in where)
    graph, state = nnx.split(objects)
    rest = [None if is_stateful(leaf) else leaf for leaf in leaves]
    made: dict[str, Any] = {}

    def pure(state: Any, rest: list[Any]) -> Any:
        before = _arrays(state)
        merged = nnx.merge(graph, state)
        filled = list(rest)
        for i, x in zip(where, merged, strict=True):
            filled[i] = x
        args, kwargs = jax.tree.unflatten(tree, filled)
        with scopes_of_modules((args, kwargs)):
            returned = fun(*args, **kwargs)
        outs, out_tree = jax.tree.flatten(returned, is_leaf=is_stateful)
        places = [_place(out, merged) for out in outs]
        new = [out for out, place in zip(outs, places, strict=True) if place == _NEW]
        made["new"], new_state = nnx.split(tuple(new)) if new else (None, None)
        made["graph"], state_after = nnx.split(merged)
        made["paths"] = [path for path, _ in nnx.to_flat_state(state_after)]
        made["tree"], made["places"] = out_tree, places
        arrays = [None if is_stateful(out) else out for out in outs]
        # Unchanged state is not written back: it may belong to an outer trace.
        return arrays, new_state, _changed(before, state_after)

    def finish(result: Any) -> Any:
        outs, new_state, state = result
        if made["graph"] != graph:
            _grow(objects, made["graph"], made["paths"], state)
        elif jax.tree.leaves(state):
            nnx.update(objects, state)
        new = iter(nnx.merge(made["new"], new_state) if made["new"] is not None else ())
        filled = [
            out if place is None else next(new) if place == _NEW else objects[place]
            for out, place in zip(outs, made["places"], strict=True)
        ]
        return jax.tree.unflatten(made["tree"], filled)

    return pure, (state, rest), finish


_NEW = -1


def is_leaf(x: Any) -> bool:
    """Whether to flatten an argument no further. A State is a leaf, although it contains Variables."""
    return is_stateful(x) or isinstance(x, nnx.State)


def _arrays(state: Any) -> dict[Any, list[Any]]:
    """The arrays of a state by path."""
    return {path: jax.tree.leaves(leaf) for path, leaf in nnx.to_flat_state(state)}


def _changed(before: dict[Any, list[Any]], after: Any) -> Any:
    """The part of a state whose arrays were replaced or added."""
    flat = nnx.to_flat_state(after)
    return nnx.from_flat_state(
        [(path, leaf) for path, leaf in flat if not _same(jax.tree.leaves(leaf), before.get(path))]
    )


def _same(arrays: list[Any], before: list[Any] | None) -> bool:
    return before is not None and len(arrays) == len(before) and all(map(operator.is_, arrays, before))


def _grow(objects: tuple[Any, ...], graph: Any, paths: Sequence[Any], changed: Any) -> None:
    """Updates objects of the caller to which the function added Variables (`sow`), or from which it removed some."""
    before = dict(nnx.to_flat_state(nnx.state(objects)))
    arrays = before | dict(nnx.to_flat_state(changed))
    grown = nnx.merge(graph, nnx.from_flat_state([(path, arrays[path]) for path in paths]))
    for path in set(before) - set(paths):
        parent, name = _parent(objects, path)
        delattr(parent, name)
    nnx.update(objects, nnx.from_flat_state([(path, x) for path, x in nnx.to_flat_state(changed) if path in before]))
    for path in paths:
        if path not in before:
            parent, name = _parent(objects, path)
            if not hasattr(parent, name):
                setattr(parent, name, getattr(_parent(grown, path)[0], name))


def _parent(node: Any, path: Sequence[Any]) -> tuple[Any, Any]:
    """The deepest existing object on a path, and the next key of the path."""
    for key in path[:-1]:
        inner = (
            node[key] if isinstance(node, (tuple, list, dict)) or not isinstance(key, str) else getattr(node, key, None)
        )
        if inner is None:
            return node, key
        node = inner
    return node, path[-1]


def _place(out: Any, merged: Sequence[Any]) -> int | None:
    """The index of the NNX argument that an output is; `_NEW` for another NNX object, None for anything else."""
    if not is_stateful(out):
        return None
    return next((i for i, x in enumerate(merged) if x is out), _NEW)
