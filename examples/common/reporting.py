"""What a run shows: progress and speed, without making the device wait; curves; and the sinks of its metrics."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from tqdm import tqdm

from examples.common.cli import UsageError, one_line
from examples.common.devices import is_main, say
from examples.common.run_folder import RunFolder, write_json

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
        hidden = self._log or not is_main()
        self._bar = tqdm(total=steps * epochs, initial=done, dynamic_ncols=True, disable=hidden, bar_format=_FORMAT)
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


# Plots training curves as PNG files, without a display.

# Colour-blind safe (Okabe and Ito).
_TRAIN, _TEST, _SCALE, _SKIP = "#0072B2", "#D55E00", "#009E73", "#CC79A7"


class Panel(NamedTuple):
    """A plot of one quantity: the label of its vertical axis, and the curves as legend to key in the metrics."""

    label: str
    curves: Mapping[str, str]
    percent: bool = False


def plot_curves(path: Path, metrics: Sequence[Mapping[str, Any]], title: str, panels: Sequence[Panel]) -> None:
    """Draws one panel per quantity and one of the loss scale with the steps skipped in each epoch.

    Args:
        path: Path of the PNG file.
        metrics: One entry per epoch, with `epoch`, `loss_scale` and the total of `skipped_steps` so far.
        title: Title over all panels.
        panels: Panels from left to right, before that of the loss scale.
    """
    from matplotlib.ticker import PercentFormatter

    epochs = [line["epoch"] for line in metrics]
    style = {"linewidth": 1.8, "marker": "o" if len(epochs) < 3 else ""}  # a line through two points is hard to see
    figure, axes = new_figure(len(panels) + 1, title)
    for axis, panel in zip(axes, panels, strict=False):
        curves = {legend: key for legend, key in panel.curves.items() if not metrics or key in metrics[0]}
        for (legend, key), colour in zip(curves.items(), (_TRAIN, _TEST), strict=False):
            axis.plot(epochs, [line[key] for line in metrics], color=colour, label=legend, **style)
        axis.set_ylabel(panel.label)
        if panel.percent:
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        axis.legend(frameon=False)
    scales = [line["loss_scale"] for line in metrics]
    axes[-1].plot(epochs, scales, color=_SCALE, drawstyle="steps-post", **style)
    totals = [0, *(line["skipped_steps"] for line in metrics)]
    skipped = [(*line, "v") for *line, a, b in zip(epochs, scales, totals, totals[1:], strict=False) if b > a]
    for point in skipped:
        axes[-1].plot(*point, color=_SKIP, markersize=7)
    # A constant scale would get an axis without ticks.
    axes[-1].set(yscale="log", ylim=(min(scales, default=1) / 4, max(scales, default=1) * 4))
    axes[-1].set_ylabel(f"loss scale{' (▼ skipped steps)' if skipped else ''}")
    for axis in axes:
        axis.set_xlabel("epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)
    save_figure(figure, path)


def new_figure(panels: int, title: str) -> tuple[Any, Any]:
    """A figure with `panels` axes in a row, drawn without a display."""
    # Do not use pyplot: its global state and backend belong to the caller.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * panels, 3.8), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG file atomically."""
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=130)
    os.replace(part, path)


# Sends the metrics of a run to TensorBoard, Weights & Biases or MLflow through their libraries.
#
# Libraries with a common interface (clu.metric_writers, Lightning's loggers) need TensorFlow or PyTorch. Files that the
# run reads (metrics.jsonl, steps.jsonl) are written by `run_folder`.

# How to write the metrics of a step, how to close, and the ID with which a resumed run continues.
Sink = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object], str | None]


class Sinks:
    """The sinks of --log-to, as a context manager. Only the main process writes.

    Args:
        names: Names of the sinks.
        folder: Folder of the run.
        settings: Flags of the run, for sinks that store them.

    Raises:
        UsageError: The library of a sink isn't installed.
    """

    def __init__(self, names: Sequence[str], folder: RunFolder, settings: Mapping[str, Any]) -> None:
        self._names = tuple(dict.fromkeys(names)) if is_main() else ()
        self._folder, self._settings = folder, settings
        self._sinks: list[Sink] = []
        for name in self._names:
            if name != "tensorboard":  # always installed, and takes a second to import
                _library(name)

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # closes all sinks even if one fails
            for _write, close, _id in self._sinks:
                stack.callback(close)

    def open(self, step: int) -> None:
        """Opens the sinks for the steps after `step`. TensorBoard drops those that an interrupted run has written.

        Raises:
            UsageError: A sink can't be opened.
        """
        path = self._folder.path / "sinks.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        for name in self._names:
            try:
                sink = _OPEN[name](self._folder, self._settings, step + 1 if step else None, known.get(name))
            except Exception as error:  # Each library has its own errors.
                raise UsageError(f"--log-to {name}: {one_line(error, 300)}") from error
            self._sinks.append(sink)
            known[name] = sink[2]
            write_json(path, known)

    def write(self, line: Mapping[str, Any]) -> None:
        """Sends every finite number of a line."""
        numbers = {name: float(x) for name, x in line.items() if isinstance(x, int | float) and math.isfinite(x)}
        values = {name: x for name, x in numbers.items() if name not in ("epoch", "step")}
        for write, _close, _id in self._sinks:
            write(values, line["step"])


def _tensorboard(folder: RunFolder, settings: Mapping[str, Any], purge_step: int | None, run: str | None) -> Sink:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge_step)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write, writer.close, None


def _wandb(folder: RunFolder, settings: Mapping[str, Any], purge_step: int | None, run: str | None) -> Sink:
    names = {"project": f"mpjax-{settings['script']}", "name": folder.path.name, "dir": str(folder.path)}
    opened = _library("wandb").init(**names, config=dict(settings), id=run, resume="allow")
    return lambda values, step: opened.log(dict(values), step=step), opened.finish, opened.id


def _mlflow(folder: RunFolder, settings: Mapping[str, Any], purge_step: int | None, run: str | None) -> Sink:
    # A client instead of `start_run`, which allows one run per process: a comparison trains several.
    client = _library("mlflow").MlflowClient()
    if run is None:
        name = f"mpjax-{settings['script']}"
        experiment = client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else client.create_experiment(name)
        run = client.create_run(where, run_name=folder.path.name).info.run_id
        for key, value in settings.items():
            client.log_param(run, key, value)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            client.log_metric(run, name, value, step=step)

    return write, lambda: client.set_terminated(run), run


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f'--log-to {name}: {one_line(error)}. Install it: pip install "mpjax[{name}]".') from error
