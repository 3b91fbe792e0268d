"""What the flags choose: each mode is a function from the flags to what it came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from examples.common.checkpoints import Checkpoints
from examples.common.hosts import say
from examples.common.loop import open_folder, train
from examples.speech.benchmark import run_benchmark, run_comparison
from examples.speech.config import Config
from examples.speech.inference import evaluate, infer
from examples.speech.reports import transcript_report
from examples.speech.task import SpeechTask, open_data

RUNS = Path("runs/speech")


def run(config: Config) -> dict[str, Any]:
    """Does what the flags say and returns what it came to: of a training what is in summary.json.

    Raises:
        UsageError: data or flags do not fit.
        Interrupted: a signal came in a training; all is saved.
    """
    if config.infer is not None:
        return infer(config)
    if config.mode == "evaluate":
        return evaluate(config)
    if config.is_benchmark:
        return run_comparison(config) if config.compare else run_benchmark(config)
    return run_training(config)


def run_training(config: Config) -> dict[str, Any]:
    """Trains, in a folder of its own or on from where an earlier run was ended."""
    task = SpeechTask(config, *open_data(config))
    folder = open_folder(config.output, RUNS, config.settings(), resume=config.resume)
    summary = folder.summary if config.resume else None
    if summary is not None:
        say(f"the run in {folder.path} has already finished")
        return summary
    with Checkpoints(folder.checkpoints) as checkpoints:
        summary = train(task, folder, checkpoints, resume=config.resume, save_every=config.save_every)
    report = transcript_report(task.transcribed, config.report)
    (folder.path / "transcripts.txt").write_text(report + "\n")
    say(report)
    bad = np.flatnonzero(task.not_finite)
    if len(bad):
        lines = [f"{task.train_set.paths[i]}: {task.not_finite[i]} times" for i in bad]
        (folder.path / "not_finite.txt").write_text("\n".join(lines) + "\n")
        say(f"{len(bad)} training files had a loss that was not finite; they are in {folder.path / 'not_finite.txt'}")
    return summary
