"""Runs the mode selected by the flags on speech."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from examples.common import modes
from examples.common.devices import DataParallel
from examples.common.hosts import is_main, say
from examples.common.run_folder import RunFolder
from examples.speech.config import Config
from examples.speech.dataset import Speech
from examples.speech.inference import evaluate, infer
from examples.speech.reports import transcript_report
from examples.speech.task import SpeechTask, open_alphabet, open_data


def run(config: Config) -> dict[str, Any]:
    """Runs the mode selected by the flags; see `examples.common.modes.run`."""
    use = {"evaluate": evaluate, "predict": infer}
    on_synthetic_audio = partial(TaskMaker, config, data=False)
    return modes.run(config, partial(TaskMaker, config), use, write_reports, on_synthetic_audio)


class TaskMaker:
    """Makes tasks for several configurations on the same speech, which is opened once."""

    def __init__(self, config: Config, data: bool = True) -> None:
        self._parallel, self._alphabet = DataParallel(config.devices, config.fsdp), open_alphabet(config)
        self._sets: dict[str, Speech] = {} if config.is_benchmark or not data else open_data(config)

    def __call__(self, config: Config) -> SpeechTask:
        return SpeechTask(config, self._parallel, self._alphabet, **self._sets)


def write_reports(task: Any, folder: RunFolder) -> None:
    """Writes the transcripts, and the names of files whose loss was not finite, to the run folder."""
    if not is_main():
        return
    if task.transcribed:
        report = transcript_report(task.transcribed, task.config.report)
        (folder.path / "transcripts.txt").write_text(report + "\n")
        say(report)
    bad = np.flatnonzero(task.not_finite)
    if len(bad):
        lines = [f"{task.train_set.paths[i]}: {task.not_finite[i]} times" for i in bad]
        (folder.path / "not_finite.txt").write_text("\n".join(lines) + "\n")
        say(f"{len(bad)} training files had a non-finite loss; they are listed in {folder.path / 'not_finite.txt'}")
