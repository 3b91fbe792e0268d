"""Runs the mode selected by the flags on images."""

from __future__ import annotations

from functools import partial
from typing import Any

from examples.common import modes
from examples.common.devices import DataParallel
from examples.imagenet.config import Config
from examples.imagenet.data import Dataset
from examples.imagenet.inference import evaluate, predict
from examples.imagenet.synthetic import Synthetic
from examples.imagenet.task import ImageTask, open_data


def run(config: Config) -> dict[str, Any]:
    """Runs the mode selected by the flags; see `examples.common.modes.run`."""
    return modes.run(config, partial(TaskMaker, config), {"evaluate": evaluate, "predict": predict})


class TaskMaker:
    """Makes tasks for several configurations on the same images, which are opened once."""

    def __init__(self, config: Config) -> None:
        self._parallel = DataParallel(config.devices, config.fsdp)
        self._sets: list[Dataset]
        if config.data_dir is None and config.is_benchmark:
            self._sets = [Synthetic(config.model_name, config.side)] * 2
        else:
            self._sets = open_data(config)

    def __call__(self, config: Config) -> ImageTask:
        train_set, test_set = self._sets
        return ImageTask(config, self._parallel, train_set, test_set)
