"""What `--mode` chooses: each mode is a function from the flags to what it came to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from examples.common.checkpoints import Checkpoints
from examples.common.devices import DataParallel
from examples.common.hosts import connect, is_main, say
from examples.common.loop import open_folder, train
from examples.imagenet.benchmark import find_batch_sizes, run_benchmark, run_comparison
from examples.imagenet.config import PRECISION, Config
from examples.imagenet.inference import evaluate, export, predict
from examples.imagenet.task import ImageTask, open_data
from examples.imagenet.weights import trained_variables

RUNS = Path("runs/imagenet")


def run(config: Config) -> dict[str, Any]:
    """Does what the flags say and returns what is in the file that it leaves: summary.json of a training.

    Raises:
        UsageError: data or flags do not fit.
        Interrupted: a signal came in a training; all is saved.
    """
    connect(config.coordinator, config.processes, config.process_id)
    if config.find_batch_size:
        return find_batch_sizes(config)
    if config.mode == "evaluate":
        return evaluate(config)
    if config.mode == "predict":
        return predict(config)
    if config.is_benchmark:
        return run_comparison(config, {}) if config.compare else run_benchmark(config)
    return train_and_compare(config) if config.compare else run_training(config)


def run_training(config: Config) -> dict[str, Any]:
    """Trains, in a folder of its own or on from where an earlier run was ended."""
    task = ImageTask(config, *open_data(config), DataParallel(config.devices))
    folder = open_folder(config.output, RUNS, config.settings(), resume=config.resume, may_change=PRECISION)
    summary = folder.summary if config.resume else None
    if summary is not None:
        say(f"the run in {folder.path} has already finished")
    else:
        with Checkpoints(folder.checkpoints) as checkpoints:
            summary = train(task, folder, checkpoints, resume=config.resume, save_every=config.save_every)
    if config.export is not None:
        summary |= export(task, trained_variables(task, folder.path), folder.path, config.export)
        if is_main():
            folder.write_summary(summary)
    return summary


def train_and_compare(config: Config) -> dict[str, Any]:
    """Trains every policy of `--compare`, each in a folder below `--output`, and measures them."""
    folder = open_folder(config.output, RUNS, config.settings(), resume=config.resume, may_change=PRECISION)
    accuracies = {}
    for policy in config.policies:
        output = folder.path / policy.replace("/", "_")
        own = dataclasses.replace(
            config, policy=policy, compare=None, output=output, resume=config.resume and output.exists()
        )
        summary = run_training(own)
        accuracies[policy] = summary.get("test_accuracy", summary["train_accuracy"])
    return run_comparison(dataclasses.replace(config, output=folder.path), accuracies)
