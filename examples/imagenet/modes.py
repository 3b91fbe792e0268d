"""What `--mode` chooses: each mode is a function from the flags to what it came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.common.checkpoints import Checkpoints
from examples.common.devices import DataParallel
from examples.common.hosts import connect, say
from examples.common.loop import open_folder, train
from examples.imagenet.config import PRECISION, Config
from examples.imagenet.task import ImageTask, open_data

RUNS = Path("runs/imagenet")


def run(config: Config) -> dict[str, Any]:
    """Does what the flags say and returns what is in the file that it leaves: summary.json of a training.

    Raises:
        UsageError: data or flags do not fit.
        Interrupted: a signal came in a training; all is saved.
    """
    connect(config.coordinator, config.processes, config.process_id)
    return run_training(config)


def run_training(config: Config) -> dict[str, Any]:
    """Trains, in a folder of its own or on from where an earlier run was ended."""
    task = ImageTask(config, *open_data(config), DataParallel(config.devices))
    folder = open_folder(config.output, RUNS, config.settings(), resume=config.resume, may_change=PRECISION)
    if config.resume and folder.summary is not None:
        say(f"the run in {folder.path} has already finished")
        return folder.summary
    with Checkpoints(folder.checkpoints) as checkpoints:
        return train(task, folder, checkpoints, resume=config.resume, save_every=config.save_every)
