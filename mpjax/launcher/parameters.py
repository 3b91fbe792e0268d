"""Recognises the training's parameters among the arguments of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Type = tuple[tuple[int, ...], Any]


class Parameters:
    """The trees that the script has differentiated with respect to.

    A program is given parameters if its arguments hold a tree with the names, shapes and dtypes of a differentiated
    one: the parameters themselves, an average of them, a target network. NNX and Equinox pass their modules as flat
    lists, so their parameters are recognised by the order of shapes and dtypes.
    """

    def __init__(self) -> None:
        self._trees: dict[tuple[tuple[tuple[str, ...], Type], ...], bool] = {}

    def __bool__(self) -> bool:
        return bool(self._trees)

    def learn(self, tree: Any) -> None:
        """Records a tree that the script differentiates with respect to. A single array has no name to be known by."""
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        named = tuple((_names(path), _type(x)) for path, x in leaves if hasattr(x, "dtype"))
        of_modules = any(isinstance(key, jax.tree_util.GetAttrKey) for path, _ in leaves for key in path)
        if named and named[0][0]:
            self._trees[named] = of_modules

    def among(self, leaves: Sequence[tuple[Any, Any]]) -> set[int]:
        """The indices of parameters among the arrays of a program's arguments, given with their tree paths."""
        types = [_type(x) for _, x in leaves]
        places = {(_names(path), kind): i for i, ((path, _), kind) in enumerate(zip(leaves, types, strict=True))}
        found: set[int] = set()
        for tree, of_modules in self._trees.items():
            found |= _by_name(tree, places)
            if of_modules:
                found |= _in_order([kind for _, kind in tree], types)
        return found


def _by_name(tree: Sequence[tuple[tuple[str, ...], Type]], places: dict[tuple[tuple[str, ...], Type], int]) -> set[int]:
    (first, kind), found = tree[0], set[int]()
    for names, candidate in places:
        prefix = names[: len(names) - len(first)]
        # Within one argument: two arrays (A, b) that happen to have the shapes of a tuple (w, b) are not parameters.
        if candidate != kind or names[len(prefix) :] != first or len(prefix) < 2:
            continue
        here = [places.get(((*prefix, *path), kind)) for path, kind in tree]
        found |= set() if None in here else {i for i in here if i is not None}
    return found


def _in_order(wanted: Sequence[Type], types: Sequence[Type]) -> set[int]:
    if len(wanted) < 2:  # any matrix of that shape would match
        return set()
    rest = iter(enumerate(types))
    found = [next((i for i, kind in rest if kind == one), None) for one in wanted]
    return set() if None in found else {i for i in found if i is not None}


def _names(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _type(x: Any) -> Type:
    return tuple(np.shape(x)), x.dtype
