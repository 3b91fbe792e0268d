"""Which of the nested derivatives are scaled where code runs: those of the scaled losses that it belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


class Level:
    """A scaled derivative, while its loss is traced.

    jit's cache key holds it, because a function that was traced in one loss must not be reused in another if it read
    the mark. Other functions are: two levels that nothing read are equal.
    """

    def __init__(self, scale: jax.Array, mark: jax.Array) -> None:
        self._how: Any = scale, mark
        self._is_read = False

    def read(self) -> tuple[jax.Array, jax.Array]:
        """The scale and the mark."""
        self._is_read = True
        return self._how

    def end(self) -> None:
        """Drops the tracers."""
        self._how = None

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Level) and not (self._is_read or other._is_read))

    def __hash__(self) -> int:
        return hash(Level)


# None outside of scaled losses; empty where cotangents are true already.
_levels = jax.make_user_context(None)


@contextlib.contextmanager
def level(scale: jax.Array, mark: jax.Array) -> Iterator[None]:
    """A context for the code of a scaled loss."""
    new = Level(scale, mark)
    try:
        with _levels((*(_levels.value or ()), new)):
            yield
    finally:
        new.end()


def no_level() -> Any:
    """A context for code whose cotangents are true."""
    return _levels(())


def levels() -> list[tuple[jax.Array, jax.Array]] | None:
    """The scale and the mark of each scaled derivative; None outside of scaled losses."""
    return None if _levels.value is None else [level.read() for level in _levels.value]
