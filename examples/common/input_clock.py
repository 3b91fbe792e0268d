"""Measures the share of the input pipeline in a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")


class InputClock:
    """Counts the time in which the device had nothing to do because the next batch was not there.

    Waiting for a batch costs nothing while the device still works on the step before, so only such waits count
    at whose end all steps were computed. Part of them may have been computed during the wait: the figure is
    an upper bound.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: Any = None

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches, with the clock running whenever the device waits for one."""
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            if all(x.is_ready() for x in jax.tree.leaves(self._last)):
                self.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def dispatched(self, outputs: Any) -> None:
        """Tells the arrays that the step just given to the device will make, and that no later one donates."""
        self._last = outputs
