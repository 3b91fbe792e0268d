"""Compilations while a step runs: their count, their time, and the shapes that changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mpjax.inspection.program import argument_name
from mpjax.inspection.reports import array_text

_EVENTS = "/jax/core/compile/"  # Tracing, lowering and XLA's compilation, as `jax.monitoring` reports them.
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Recompilation:
    """Recompilation of a step during its measurement.

    Args:
        steps: Number of measured steps that were recompiled.
        measured: Number of measured steps.
        seconds: Mean time of tracing and compiling in a recompiled step.
        changed: For each argument that changed, by tree path, its successive types, as `float32[8,64]`. If it is empty,
            a static argument or the function itself is a new object at each call.
    """

    steps: int
    measured: int
    seconds: float
    changed: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        if not self.changed:
            return (
                "no shape, dtype or structure changed: a static argument, or a function created at each call "
                "(a lambda, functools.partial)"
            )
        return differences(self.changed)


class Compilations:
    """A context manager that counts compilations.

    Attributes:
        seconds: Total time of tracing and compiling.
        count: Number of compiled programs.
    """

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0

    def __enter__(self) -> Compilations:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.startswith(_EVENTS):
            self.seconds += duration_secs
            self.count += event.endswith("backend_compile_duration")


def described(args: Sequence[Any]) -> dict[str, str]:
    """The types of the arguments by tree path, as in the compilation cache: `args[1]['x']` is `float32[8,64]`.

    Example:
        >>> import jax.numpy as jnp
        >>> described((jnp.ones((2, 3)), {"n": 1}))
        {'args[0]': 'float32[2,3]', "args[1]['n']": 'int'}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(([*args],))
    return {argument_name(jax.tree_util.keystr(path)): _kind(leaf) for path, leaf in leaves}


def changes(calls: Sequence[dict[str, str]]) -> dict[str, tuple[str, ...]]:
    """The arguments whose types differ between calls.

    Example:
        >>> changes([{"args[0]": "float32[2]", "args[1]": "int"}, {"args[0]": "float32[3]", "args[1]": "int"}])
        {'args[0]': ('float32[2]', 'float32[3]')}
    """
    names = dict.fromkeys(name for call in calls for name in call)
    found = {name: tuple(dict.fromkeys(call.get(name, "absent") for call in calls)) for name in names}
    return {name: kinds for name, kinds in found.items() if len(kinds) > 1}


def differences(changed: Mapping[str, Sequence[str]]) -> str:
    """The first results of `changes`, as text."""
    rows = [f"{name}: {', '.join(_first(kinds))}" for name, kinds in changed.items()]
    return "; ".join(_first(rows))


def _kind(leaf: Any) -> str:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    weak = " (weakly typed)" if getattr(leaf, "weak_type", False) else ""
    return array_text(leaf) + weak


def _first(texts: Sequence[str]) -> list[str]:
    more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return [*texts[:_SHOWN], *more]
