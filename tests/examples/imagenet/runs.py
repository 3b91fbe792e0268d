"""Runs of the image example that take a second: a tiny model, 96 digits, programs compiled once for all tests."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples.common.checkpoints import Checkpoints
from examples.common.training import DataParallel, TrainState
from examples.imagenet import models
from examples.imagenet.config import Config
from examples.imagenet.data import EMBEDDED, Batch, Digits
from examples.imagenet.train import ImageTask, main
from tests.examples.errors import line_of_error

# The program that another process runs for `python -m examples.imagenet` with the tiny model.
PROGRAM = """
import sys, pytest
from tests.examples import quick
from tests.examples.imagenet import runs
patch = pytest.MonkeyPatch()
quick.make_quick(patch)
runs.make_quick(patch)
sys.exit(runs.main(sys.argv[1:]))
"""


class FewDigits(Digits):
    """The first 96 digits: an epoch has three steps."""

    def __len__(self) -> int:
        return min(96, super().__len__())


def make_quick(patch: pytest.MonkeyPatch) -> None:
    """One narrow block as the default model, and few digits: most of a test's time is compilation."""
    patch.setitem(
        models.KINDS,
        "resnet8",
        models.Kind(models.ResNet, {"block": models.BasicBlock, "stage_sizes": (1,), "width": 4}),
    )
    patch.setitem(EMBEDDED, "digits", FewDigits)


def digit_flags(output: Path, *flags: str) -> list[str]:
    return ["--epochs", "2", "--batch-size", "32", "--devices", "1", "--output", str(output), *flags]


def folder_flags(root: Path, *flags: str) -> list[str]:
    """The flags of a tiny run on a tree of images. Without a schedule, any number of steps compiles to one program."""
    tiny = ["--image-size", "16", "--model", "resnet8", "--batch-size", "4", "--epochs", "1", "--devices", "1"]
    return ["--data-dir", str(root), *tiny, "--schedule", "constant", "--warmup-epochs", "0", *flags]


def digits_task(devices: int = 1, **flags: Any) -> ImageTask:
    """The task of a run with these flags."""
    config = Config(**{"batch_size": 32, **flags})
    return ImageTask(config, DataParallel(devices, config.fsdp), ImageTask.open(config))


def state_and_batch(task: ImageTask) -> tuple[TrainState, Batch]:
    """The initial state and the first batch of a run."""
    batch = next(task.batches(0, 0))
    task.close()
    return task.initial_state(), batch


def last_state(output: Path, **flags: Any) -> TrainState:
    """The state in the newest checkpoint of a run with these flags."""
    with Checkpoints(output / "checkpoints") as checkpoints:
        restored = digits_task(**flags).restore_as_saved(checkpoints)
    assert restored is not None
    return restored[0]


def as_bytes(tree: Any) -> list[bytes]:
    """The bytes of each array, for bitwise comparison."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def metrics_of(output: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without values that depend on time."""
    timing = {"images_per_second": 0}
    return [json.loads(line) | timing for line in (output / "metrics.jsonl").read_text().splitlines()]


error_of = functools.partial(line_of_error, main)
