"""Shows the progress and speed of a run without making the device wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from tqdm import tqdm

from examples.common.hosts import is_main

# Steps between two reads from the device. Each shows the values of the previous read, which are already computed.
_EVERY = 10
_LOG_SECONDS = 10.0  # between two lines of a log file
# A fixed width: the rest of the line could be a bar of one character.
_FORMAT = "{desc} {percentage:3.0f}% |{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


class Progress:
    """A progress bar over the steps of the run, or regular lines in a log file, and a line per epoch.

    Args:
        epochs: Number of epochs of the run.
        steps: Number of steps of an epoch.
        done: Number of steps taken before a resumed run was interrupted.
        unit: What an item is, in the plural, such as "images".
        text: Makes the bar's text from the outputs of a step, on the host.
    """

    def __init__(self, epochs: int, steps: int, done: int, unit: str, text: Callable[[Any], str]) -> None:
        self._epochs, self._unit, self._text = epochs, unit, text
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps * epochs,
            initial=done,
            dynamic_ncols=True,
            disable=not (is_main() and self._on_terminal),
            mininterval=0.2,
            bar_format=_FORMAT,
        )
        self._total, self._done, self._logged = steps * epochs, done, time.perf_counter()
        self._epoch = 0
        self._before: tuple[Any, int] | None = None
        self._steps, self._items, self._started = 0, 0, 0.0
        self.items_per_second = 0.0  # training speed in the current epoch

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def epoch_started(self, epoch: int) -> None:
        self._epoch = epoch + 1
        self._bar.set_description(f"epoch {self._epoch}/{self._epochs}", refresh=False)
        self._before, self._steps, self._items, self.items_per_second = None, 0, 0, 0.0
        self._started = time.perf_counter()

    def step(self, outputs: Any, items: int) -> None:
        """Counts a step of `items` items. `outputs` are its outputs on the device."""
        self._steps += 1
        self._done += 1
        self._items += items
        self._bar.update()
        if self._steps % _EVERY == 0:
            if self._before is not None:
                # Only the steps up to these outputs are known to be done. Later ones may only be queued.
                numbers, done = self._before
                self._show(jax.device_get(numbers), done)
            self._before = outputs, self._items

    def epoch_trained(self) -> tuple[int, float]:
        """Items and seconds of the epoch. All of its steps must have been computed."""
        self.items_per_second = self._speed(self._items)
        return self._items, time.perf_counter() - self._started

    def epoch_done(self, text: str) -> None:
        """Prints the line of an epoch above the bar."""
        if not is_main():
            return
        if self._on_terminal:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def _show(self, outputs: Any, done: int) -> None:
        self.items_per_second = self._speed(done)
        text = f"{self._text(outputs)}, {self.items_per_second:,.0f} {self._unit}/s"
        self._bar.set_postfix_str(text, refresh=False)
        now = time.perf_counter()
        if not self._on_terminal and is_main() and now - self._logged > _LOG_SECONDS:
            self._logged = now
            print(f"epoch {self._epoch}/{self._epochs} step {self._done}/{self._total}: {text}", flush=True)

    def _speed(self, items: int) -> float:
        return items / (time.perf_counter() - self._started)
