"""What the flags choose: each mode is a function from the flags to what it came to."""

from __future__ import annotations

from typing import Any

import numpy as np

from examples.common.benchmarks import find_batch_sizes, run_benchmark, run_comparison
from examples.common.config import INSPECT
from examples.common.devices import DataParallel
from examples.common.hosts import say
from examples.common.loop import open_folder
from examples.common.modes import inspect, run_training, train_and_compare
from examples.common.run_folder import RunFolder
from examples.speech.config import Config
from examples.speech.dataset import Speech
from examples.speech.inference import evaluate, infer
from examples.speech.reports import transcript_report
from examples.speech.task import SpeechTask, open_alphabet, open_data


def run(config: Config) -> dict[str, Any]:
    """Does what the flags say and returns what it came to: of a training what is in summary.json.

    Raises:
        UsageError: data or flags do not fit.
        Interrupted: a signal came in a training; all is saved.
    """
    if config.action in ("evaluate", "predict"):
        return evaluate(config) if config.action == "evaluate" else infer(config)
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
        return train_and_compare(config, make, TaskMaker(config, data=False), write_reports)
    return run_training(config, make, write_reports)


class TaskMaker:
    """Tasks of several flags on the same speech, which is opened once."""

    def __init__(self, config: Config, data: bool = True) -> None:
        self._parallel, self._alphabet = DataParallel(config.devices), open_alphabet(config)
        self._sets: dict[str, Speech] = {} if config.is_benchmark or not data else open_data(config)

    def __call__(self, config: Config) -> SpeechTask:
        return SpeechTask(config, self._parallel, self._alphabet, **self._sets)


def write_reports(task: Any, folder: RunFolder) -> None:
    """Leaves transcripts, and the names of files whose loss was not finite."""
    if task.transcribed:
        report = transcript_report(task.transcribed, task.config.report)
        (folder.path / "transcripts.txt").write_text(report + "\n")
        say(report)
    bad = np.flatnonzero(task.not_finite)
    if len(bad):
        lines = [f"{task.train_set.paths[i]}: {task.not_finite[i]} times" for i in bad]
        (folder.path / "not_finite.txt").write_text("\n".join(lines) + "\n")
        say(f"{len(bad)} training files had a loss that was not finite; they are in {folder.path / 'not_finite.txt'}")
