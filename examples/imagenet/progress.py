"""The progress bar. It reads numbers that are some steps old, so that no step waits for it."""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
from tqdm import tqdm

from examples.imagenet.config import Config

# Steps between two looks at the device. What is shown is one look old: by then it has long been computed.
_EVERY = 10


class Progress:
    """A bar over the steps of the whole run, and a line per epoch."""

    def __init__(self, config: Config, steps: int, done: int) -> None:
        self._config, self._steps = config, steps
        self._on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=steps * config.epochs,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            # Redrawing means a new line in a log file: there now and then is enough.
            mininterval=0.2 if self._on_terminal else 10.0,
        )
        self._before: Any = None
        self._count, self._started = 0, 0.0
        self.images_per_second = 0.0  # training speed in the current epoch

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def epoch_started(self, epoch: int) -> None:
        self._bar.set_description(f"epoch {epoch + 1}/{self._config.epochs}", refresh=False)
        self._before, self._count, self.images_per_second = None, 0, 0.0
        self._started = time.perf_counter()

    def step(self, shown: Any) -> None:
        """Counts a step; `shown` are its numbers, still on the device."""
        self._count += 1
        self._bar.update()
        if self._count % _EVERY == 0:
            if self._before is not None:
                self._show(jax.device_get(self._before))
            self._before = shown

    def epoch_trained(self) -> None:
        """Takes the epoch's speed; all its steps must have been computed."""
        self.images_per_second = self._speed(self._count)

    def epoch_done(self, line: dict[str, Any]) -> None:
        """Prints the line of an epoch, above the bar."""
        text = (
            f"epoch {line['epoch']:3d}/{self._config.epochs}  "
            f"train loss {line['train_loss']:.4f} accuracy {line['train_accuracy']:.2%}  "
            f"test loss {line['test_loss']:.4f} accuracy {line['test_accuracy']:.2%}  "
            f"{line['images_per_second']:,.0f} images/s  loss scale {line['loss_scale']:g}  "
            f"skipped {line['skipped_steps']}"
        )
        if self._on_terminal:
            self._bar.write(text, file=sys.stdout)
        else:
            print(text, flush=True)

    def _show(self, shown: Any) -> None:
        # Only the steps up to these numbers are known to be done; the later ones are merely queued.
        self.images_per_second = self._speed(self._count - _EVERY)
        loss, accuracy = shown["totals"].means()
        self._bar.set_postfix_str(
            f"loss {loss:.4f}, accuracy {accuracy:.2%}, {self.images_per_second:,.0f} images/s, "
            f"loss scale {shown['loss_scale']:g}, skipped steps {shown['skipped_steps']}",
            refresh=False,
        )

    def _speed(self, steps: int) -> float:
        return steps * self._config.batch_size / (time.perf_counter() - self._started)
