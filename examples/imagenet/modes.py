"""What the flags choose: each mode is a function from the flags to what it came to."""

from __future__ import annotations

from typing import Any

from examples.common.benchmarks import find_batch_sizes, run_benchmark, run_comparison
from examples.common.config import INSPECT
from examples.common.devices import DataParallel
from examples.common.hosts import connect
from examples.common.loop import open_folder
from examples.common.modes import inspect, run_training, train_and_compare
from examples.imagenet.config import Config
from examples.imagenet.data import Dataset
from examples.imagenet.inference import evaluate, predict
from examples.imagenet.synthetic import Synthetic
from examples.imagenet.task import ImageTask, open_data


def run(config: Config) -> dict[str, Any]:
    """Does what the flags say and returns what is in the file that it leaves: summary.json of a training.

    Raises:
        UsageError: data or flags do not fit.
        Interrupted: a signal came in a training; all is saved.
    """
    connect(config.coordinator, config.processes, config.process_id)
    if config.action in ("evaluate", "predict"):
        return evaluate(config) if config.action == "evaluate" else predict(config)
    make = TaskMaker(config)
    if config.action in INSPECT:
        return inspect(config, make)
    if config.action == "find_batch_size":
        return find_batch_sizes(config, make)
    if config.is_benchmark:
        if not config.compare:
            return run_benchmark(config, make)
        with open_folder(config, "-benchmarks") as folder:
            return run_comparison(config, make, folder)
    if config.compare:
        return train_and_compare(config, make, make)
    return run_training(config, make)


class TaskMaker:
    """Tasks of several flags on the same images, which are opened once."""

    def __init__(self, config: Config) -> None:
        self._parallel = DataParallel(config.devices)
        self._sets: list[Dataset]
        if config.data_dir is None and config.is_benchmark:
            self._sets = [Synthetic(config.model_name, config.side)] * 2
        else:
            self._sets = open_data(config)

    def __call__(self, config: Config) -> ImageTask:
        train_set, test_set = self._sets
        return ImageTask(config, self._parallel, train_set, test_set)
