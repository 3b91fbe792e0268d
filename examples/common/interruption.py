"""Turns Ctrl-C and SIGTERM into a flag that a training loop reads between steps.

Orbax's `reached_preemption` handles only SIGTERM, and only under `jax.distributed`.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A context in which the first SIGINT or SIGTERM asks the loop to stop at the next step.

    A second signal has its normal effect, so that a hanging run can still be ended.

    Attributes:
        signal: The received signal, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        # Python allows only the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    @property
    def exit_code(self) -> int:
        """The exit code that shells report for this signal; 0 without a signal."""
        return 128 + self.signal if self.signal else 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
