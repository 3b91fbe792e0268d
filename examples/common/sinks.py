"""Sends the metrics of a run to TensorBoard, Weights & Biases or MLflow through their libraries.

Libraries with a common interface (clu.metric_writers, Lightning's loggers) need TensorFlow or PyTorch. Files that the
run reads (metrics.jsonl, steps.jsonl) are written by `run_folder`.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from examples.common.cli import UsageError, one_line
from examples.common.hosts import is_main
from examples.common.run_folder import RunFolder, write_json

# How to write the metrics of a step, and how to write pending ones and close.
Sink = tuple[Callable[[Mapping[str, float], int], object], Callable[[], object]]


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
            for _write, close in self._sinks:
                stack.callback(close)

    def open(self, step: int) -> None:
        """Opens the sinks for the steps after `step`. TensorBoard drops those that an interrupted run has written.

        Raises:
            UsageError: A sink can't be opened.
        """
        for name in self._names:
            try:
                self._sinks.append(_OPEN[name](self._folder, self._settings, step + 1 if step else None))
            except Exception as error:  # Each library has its own errors.
                raise UsageError(f"--log-to {name}: {one_line(error, 300)}") from error

    def write(self, line: Mapping[str, Any]) -> None:
        """Sends every finite number of a line."""
        numbers = {name: float(x) for name, x in line.items() if isinstance(x, int | float) and math.isfinite(x)}
        values = {name: x for name, x in numbers.items() if name not in ("epoch", "step")}
        for write, _close in self._sinks:
            write(values, line["step"])


def _tensorboard(folder: RunFolder, settings: Mapping[str, Any], purge_step: int | None) -> Sink:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=purge_step)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return write, writer.close


def _wandb(folder: RunFolder, settings: Mapping[str, Any], purge_step: int | None) -> Sink:
    run = _library("wandb").init(
        project=f"mpjax-{settings['script']}",
        name=folder.path.name,
        dir=str(folder.path),
        config=dict(settings),
        id=_saved(folder, "wandb"),
        resume="allow",
    )
    _save(folder, "wandb", run.id)
    return lambda values, step: run.log(dict(values), step=step), run.finish


def _mlflow(folder: RunFolder, settings: Mapping[str, Any], purge_step: int | None) -> Sink:
    # A client instead of `start_run`, which allows one run per process: a comparison trains several.
    client, run = _library("mlflow").MlflowClient(), _saved(folder, "mlflow")
    if run is None:
        name = f"mpjax-{settings['script']}"
        experiment = client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else client.create_experiment(name)
        run = client.create_run(where, run_name=folder.path.name).info.run_id
        for key, value in settings.items():
            client.log_param(run, key, value)
        _save(folder, "mlflow", run)

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            client.log_metric(run, name, value, step=step)

    return write, lambda: client.set_terminated(run)


_OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f'--log-to {name}: {one_line(error)}. Install it with pip install "mpjax[{name}]", or leave it out.'
        ) from error


def _saved(folder: RunFolder, sink: str) -> str | None:
    """The sink's ID of this run, with which a resumed run continues it; None for a new run."""
    try:
        return json.loads((folder.path / "sinks.json").read_text()).get(sink)
    except FileNotFoundError:
        return None


def _save(folder: RunFolder, sink: str, run: str) -> None:
    path = folder.path / "sinks.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, before | {sink: run})
