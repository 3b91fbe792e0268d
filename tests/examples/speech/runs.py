"""Runs of the speech example that take a second: a tiny model on tones, programs compiled once for all tests."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.training import DataParallel
from examples.speech.config import Config
from examples.speech.dataset import Alphabet, Speech, read_speech
from examples.speech.train import SpeechTask, main
from tests.examples.errors import line_of_error

# One layer of each kind, since most of a test's time is compilation. Used as flags and as arguments of `Config`.
MODEL = {"hidden": 8, "context": 1, "stride": 2, "cell": "rnn", "bidirectional": False, "layer_norm": False}
RUN = {"batch_size": 4, "buckets": 1, "epochs": 2, "augment": False, "optimizer": "sgd"}


def as_flags(**arguments: Any) -> list[str]:
    """Arguments of `Config` as a command line."""
    flags = []
    for name, value in arguments.items():
        dashed = name.replace("_", "-")
        flags += [f"--{dashed}" if value else f"--no-{dashed}"] if isinstance(value, bool) else [f"--{dashed}={value}"]
    return flags


TINY_MODEL = [*as_flags(**MODEL), "--devices=1"]
TINY = [*TINY_MODEL, *as_flags(**RUN)]


def open_speech(path: Path, alphabet: Alphabet | None = None, max_skipped: float = 0.01, **how: Any) -> Speech:
    """Speech with the defaults of the flags, of any length."""
    longest = how.pop("max_seconds", math.inf)
    return Speech(str(path), read_speech(path, **how), alphabet or Alphabet(), max_skipped, longest)


def task_of(data: dict[str, Path], devices: int = 1, **flags: Any) -> SpeechTask:
    """The task of a run with `TINY` and these flags."""
    config = Config(**{**MODEL, **RUN, **data, **flags})
    return SpeechTask(config, DataParallel(devices, config.fsdp), SpeechTask.open(config))


def lines_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def as_bytes(leaves: list[Any]) -> list[bytes]:
    """The bytes of each array, for bitwise comparison."""
    return [np.asarray(x).tobytes() for x in leaves]


error_of = functools.partial(line_of_error, main)
