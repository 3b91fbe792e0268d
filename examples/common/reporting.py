"""What a run shows: progress and speed, without making the device wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from tqdm import tqdm

from examples.common.devices import say

T = TypeVar("T")

# Steps between two reads from the device. Each shows the values of the previous read, which are already computed.
_EVERY = 10
_LOG_SECONDS = 10.0  # between two lines of a log file
# A fixed width: the rest of the line could be a bar of one character.
_FORMAT = "{desc} {percentage:3.0f}% |{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


class Progress:
    """A progress bar over the steps of the run, or regular lines in a log file.

    Args:
        epochs: Number of epochs of the run.
        steps: Number of steps of an epoch.
        done: Number of steps taken before a resumed run was interrupted.
        unit: What an item is, in the plural, such as "images".
        text: Makes the bar's text from the outputs of a step, on the host.

    Attributes:
        items_per_second: The training speed in the current epoch.
    """

    def __init__(self, epochs: int, steps: int, done: int, unit: str, text: Callable[[Any], str]) -> None:
        self._epochs, self._unit, self._text = epochs, unit, text
        self._log = not sys.stderr.isatty()
        self._bar = tqdm(total=steps * epochs, initial=done, dynamic_ncols=True, disable=self._log, bar_format=_FORMAT)
        self._done, self._logged, self._epoch = done, time.perf_counter(), 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def epoch_started(self, epoch: int) -> None:
        self._epoch = epoch + 1
        self._bar.set_description(f"epoch {self._epoch}/{self._epochs}", refresh=False)
        self._before: tuple[Any, int] | None = None
        self._items, self._started, self.items_per_second = 0, time.perf_counter(), 0.0

    def step(self, outputs: Any, items: int) -> None:
        """Counts a step of `items` items. `outputs` are its outputs on the device."""
        self._done, self._items = self._done + 1, self._items + items
        self._bar.update()
        if self._done % _EVERY == 0:
            if self._before is not None:
                # Only the steps up to these outputs are known to be done. Later ones may only be queued.
                numbers, computed = self._before
                self._show(jax.device_get(numbers), computed)
            self._before = outputs, self._items

    def epoch_trained(self) -> tuple[int, float]:
        """Items and seconds of the epoch. All of its steps must have been computed."""
        seconds = time.perf_counter() - self._started
        self.items_per_second = self._items / seconds
        return self._items, seconds

    def _show(self, outputs: Any, computed: int) -> None:
        now = time.perf_counter()
        self.items_per_second = computed / (now - self._started)
        text = f"{self._text(outputs)}, {self.items_per_second:,.0f} {self._unit}/s"
        self._bar.set_postfix_str(text, refresh=False)
        if self._log and now - self._logged > _LOG_SECONDS:
            self._logged = now
            say(f"epoch {self._epoch}/{self._epochs} step {self._done}: {text}")
