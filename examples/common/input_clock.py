"""Measures the share of the input pipeline in a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TypeVar

import jax

T = TypeVar("T")


class InputClock:
    """Measures the time for which the device was idle because the next batch was not ready.

    A wait costs nothing while the device still computes the previous step. So a wait counts only if all steps are
    computed at its end. Some may have been computed during the wait, so the result is an upper bound.

    Attributes:
        seconds: Idle time so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: Any = None

    def batches(self, batches: Iterator[T]) -> Iterator[T]:
        """Yields the batches and counts the time for which the device waits for one."""
        while True:
            started = time.perf_counter()
            batch = next(batches, None)
            if all(x.is_ready() for x in jax.tree.leaves(self._last)):
                self.seconds += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def dispatched(self, outputs: Any) -> None:
        """Records the outputs of the last dispatched step. No later step may donate them."""
        self._last = outputs
