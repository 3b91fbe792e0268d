"""The progress of a run, and the training speed; nothing here makes the device wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
from tqdm import tqdm

from examples.common.hosts import is_main

# Steps between two looks at the device. What is shown is one look old: by then it has long been computed.
_EVERY = 10
_LOG_SECONDS = 10.0  # between two lines in a log file
# Of a fixed width: what is left of a line would be a bar of one character.
_FORMAT = "{desc} {percentage:3.0f}% |{bar:12}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


class Progress:
    """A bar over the steps of the whole run, or in a log file a line now and then; and a line per epoch.

    Args:
        epochs: of the run.
        steps: in an epoch.
        done: steps taken before, in an interrupted run.
        unit: what the speed counts, in the plural: "images".
        text: makes the bar's text of what a step shows, on the host.
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

    def step(self, shown: Any, items: int) -> None:
        """Counts a step of that many items; `shown` are its numbers, still on the device."""
        self._steps += 1
        self._done += 1
        self._items += items
        self._bar.update()
        if self._steps % _EVERY == 0:
            if self._before is not None:
                # Only the steps up to these numbers are known to be done; the later ones are merely queued.
                numbers, done = self._before
                self._show(jax.device_get(numbers), done)
            self._before = shown, self._items

    def epoch_trained(self) -> tuple[int, float]:
        """Items and seconds of the epoch, all of whose steps must have been computed."""
        self.items_per_second = self._speed(self._items)
        return self._items, time.perf_counter() - self._started

    def epoch_done(self, text: str) -> None:
        """Prints the line of an epoch, above the bar."""
        if not is_main():
            return
        if self._on_terminal:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def _show(self, shown: Any, done: int) -> None:
        self.items_per_second = self._speed(done)
        text = f"{self._text(shown)}, {self.items_per_second:,.0f} {self._unit}/s"
        self._bar.set_postfix_str(text, refresh=False)
        now = time.perf_counter()
        if not self._on_terminal and is_main() and now - self._logged > _LOG_SECONDS:
            self._logged = now
            print(f"epoch {self._epoch}/{self._epochs} step {self._done}/{self._total}: {text}", flush=True)

    def _speed(self, items: int) -> float:
        return items / (time.perf_counter() - self._started)
