"""Calls with NNX objects as calls of pure functions of arrays.

An NNX object has identity: changes that a function makes to it (batch statistics, RNG counts) must reach the caller.
The pure function works on a copy, and the new state is written into the caller's objects afterwards. Flax is imported
only where a tree holds an NNX object.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax


def is_of_nnx(x: Any, names: str) -> bool:
    """Whether `x` is an instance of one of these classes of NNX; no object is before NNX is imported."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, tuple(getattr(nnx, name) for name in names.split()))


def is_nnx_object(x: Any) -> bool:
    """Whether `x` is an NNX module (or other NNX graph object)."""
    return is_of_nnx(x, "Pytree")


def held(tree: Any, is_part: Callable[[Any], bool]) -> list[Any]:
    """The parts of a tree for which something is true, at any depth, but not those inside of them."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_part) if is_part(x)]


def contains_nnx_object(tree: Any) -> bool:
    """Whether a tree holds an NNX module at any depth."""
    return bool(held(tree, is_nnx_object))


def is_stateful(x: Any) -> bool:
    """Whether `x` is an NNX object or Variable, whose state a function may change."""
    return is_of_nnx(x, "Pytree Variable")


def contains_state(tree: Any) -> bool:
    """Whether a tree holds an NNX object or Variable at any depth."""
    return bool(held(tree, is_stateful))


def filled(values: Iterable[Any], places: Iterable[int], others: Iterable[Any]) -> list[Any]:
    """A list of values with others at some places."""
    result = list(values)
    for i, x in zip(places, others, strict=True):
        result[i] = x
    return result


def split_arrays(tree: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """The arrays among the leaves of a tree, and a function that rebuilds the tree with others in their places.

    The function holds no array: a tracer must not outlive its trace.
    """
    leaves, structure = jax.tree.flatten(tree)
    kept = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]

    def rebuild(arrays: Iterable[Any]) -> Any:
        rest = iter(arrays)
        return jax.tree.unflatten(structure, [next(rest) if x is _ARRAY else x for x in kept])

    return [x for x in leaves if isinstance(x, jax.Array)], rebuild


_ARRAY = object()  # in place of an array in a tree


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


def with_module(fun: Callable[..., Any], kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """The call with an NNX module as an argument, if it is the function or the object of a bound method."""
    module = fun if is_nnx_object(fun) else getattr(fun, "__self__", None)
    if not is_nnx_object(module):
        return fun, kwargs
    method = type(module).__call__ if module is fun else fun.__func__  # type: ignore[attr-defined]
    return lambda *args, _module, **kwargs: method(_module, *args, **kwargs), {**kwargs, "_module": module}


def functional(fun: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Converts a call with NNX objects to a call of a pure function of arrays. Other calls are returned unchanged.

    Returns:
        The pure function, its arguments, its keyword arguments, and a function that takes its result, writes the new
        state into the caller's objects, and returns the result of `fun`.
    """
    fun, kwargs = with_module(fun, kwargs)
    if not contains_state((args, kwargs)):
        return fun, args, kwargs, lambda out: out
    from flax import nnx

    leaves, tree = jax.tree.flatten((tuple(args), kwargs), is_leaf=is_leaf)
    where = [i for i, leaf in enumerate(leaves) if is_stateful(leaf)]
    objects = tuple(leaves[i] for i in where)
    graph, state = nnx.split(objects)
    rest = [None if is_stateful(leaf) else leaf for leaf in leaves]
    made: dict[str, Any] = {}

    def pure(state: Any, rest: list[Any]) -> Any:
        before = _arrays(state)
        merged = nnx.merge(graph, state, copy=True)  # never the caller's own Variables
        args, kwargs = jax.tree.unflatten(tree, filled(rest, where, merged))
        returned = fun(*args, **kwargs)
        outs, out_tree = jax.tree.flatten(returned, is_leaf=is_stateful)
        paths = {id(x): path for path, x in _attributes(merged).items()} if contains_state(outs) else {}
        places = [paths.get(id(out), _NEW) if is_stateful(out) else None for out in outs]
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
        known = _attributes(objects) if any(made["places"]) else {}
        results = [
            out if place is None else next(new) if place == _NEW else known[place]
            for out, place in zip(outs, made["places"], strict=True)
        ]
        return jax.tree.unflatten(made["tree"], results)

    return pure, (state, rest), {}, finish


def with_values(inputs: Any, variables: Sequence[Any], values: Sequence[Any], args: Any) -> Any:
    """The arguments of a `functional` call on `args`, in which some of their Variables hold other values."""
    from flax import nnx

    objects = tuple(x for x in jax.tree.leaves(args, is_leaf=is_leaf) if is_stateful(x))
    paths = {id(variable): path for path, variable in nnx.to_flat_state(nnx.state(objects))}
    state, rest = inputs
    flat = dict(nnx.to_flat_state(state))
    for variable, value in zip(variables, values, strict=True):
        path = paths[id(variable)]
        flat[path] = flat[path].replace(value)
    return nnx.from_flat_state(list(flat.items())), rest


_NEW = (None,)  # in place of a path


def is_leaf(x: Any) -> bool:
    """Whether to flatten an argument no further. A State is a leaf, although it contains Variables."""
    return is_of_nnx(x, "Pytree Variable State")


def _arrays(state: Any) -> dict[Any, list[Any]]:
    """The arrays of a state by path."""
    from flax import nnx

    return {path: jax.tree.leaves(leaf) for path, leaf in nnx.to_flat_state(state)}


def _changed(before: dict[Any, list[Any]], after: Any) -> Any:
    """The part of a state whose arrays were replaced or added."""
    from flax import nnx

    flat = nnx.to_flat_state(after)
    return nnx.from_flat_state(
        [(path, leaf) for path, leaf in flat if not _same(jax.tree.leaves(leaf), before.get(path))]
    )


def _same(arrays: list[Any], before: list[Any] | None) -> bool:
    return before is not None and len(arrays) == len(before) and all(map(operator.is_, arrays, before))


def _grow(objects: tuple[Any, ...], graph: Any, paths: Sequence[Any], changed: Any) -> None:
    """Updates objects of the caller whose attributes the function changed, other than the values of Variables."""
    from flax import nnx

    before, after = (dict(nnx.to_flat_state(state)) for state in (nnx.state(objects), changed))
    arrays = before | after
    nnx.update(objects, nnx.from_flat_state([(path, x) for path, x in after.items() if path in before]))
    grown = nnx.merge(graph, nnx.from_flat_state([(path, arrays[path]) for path in paths]))
    _become_like(_attributes(objects), _attributes(grown))


def _become_like(mine: dict[Any, Any], theirs: dict[Any, Any]) -> None:
    """Gives NNX objects the attributes of others; both by path, with all attributes below."""
    from flax import nnx

    for path in mine.keys() - theirs.keys():
        if is_nnx_object(mine.get(path[:-1])) and path[:-1] in theirs:
            delattr(mine[path[:-1]], path[-1])
    for path in sorted(theirs, key=len):
        old, new, parent = mine.get(path, _NEW), theirs[path], mine.get(path[:-1])
        if type(old) is type(new) and (contains_state(new) or hasattr(new, "shape") or old == new):
            continue  # Values of arrays are updated with those of Variables.
        if is_nnx_object(parent):
            setattr(parent, str(path[-1]), nnx.data(new) if contains_state(new) else new)
        elif isinstance(parent, (dict, list)):
            parent[path[-1]] = new


def _attributes(objects: Any) -> dict[Any, Any]:
    """All objects and attributes below some objects, by path."""
    from flax import nnx

    found = ((path, x) for path, x in nnx.iter_graph(objects) if path)
    return {path: x for path, x in found if not str(path[-1]).startswith("_pytree__")}
