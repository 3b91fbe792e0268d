"""The image example on several devices and in several processes has the losses of one device."""

from __future__ import annotations

import signal

import jax
import numpy as np
import pytest

from examples.common.cli import UsageError
from examples.common.devices import DataParallel
from examples.common.training import means
from examples.imagenet.__main__ import main
from tests.examples.imagenet.runs import PROGRAM, as_bytes, digits_task, last_state, metrics_of
from tests.examples.processes import run_together

pytestmark = pytest.mark.usefixtures("quick_runs")


def test_four_devices_train_like_one():
    """With replicated state; the test of the speech example shards it."""
    totals = []
    for devices in (1, 4):
        task = digits_task(devices, policy="float32", epochs=1)
        state = task.initial_state()
        for batch in task.batches(0, 0):
            assert len(batch.images.sharding.device_set) == devices
            state, _ = task.training.train_step(state, batch)
        task.close()
        assert all(len(x.sharding.device_set) == devices and x.is_fully_replicated for x in jax.tree.leaves(state))
        totals.append(list(means(state.totals).values()))
    # Only the order of sums differs.
    np.testing.assert_allclose(totals[1], totals[0], rtol=1e-5)


def test_indivisible_batches_are_refused():
    with pytest.raises(UsageError, match="--batch-size 30 cannot be divided among 4 devices"):
        DataParallel().check(30)
    with pytest.raises(UsageError, match="--devices 5"):
        DataParallel(5)


# The second of two processes dies in its eighth step, when the state after the sixth is on disk.
DYING = PROGRAM.replace(
    "sys.exit",
    """
import os, pathlib, signal, time
from examples.imagenet.train import ImageTask
steps, real = [], ImageTask.train_step
def train_step(self, state, batch):
    steps.append(1)
    while len(steps) == 8:
        if (self.config.output / "checkpoints" / "6").is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
    return real(self, state, batch)
ImageTask.train_step = train_step
sys.exit""",
)


@pytest.mark.slow
def test_run_resumes_bitwise_after_one_of_two_processes_is_killed(tmp_path):
    # Not covered: a process that dies while all save together. JAX then ends the others before Orbax can report it.
    flags = ["--epochs", "3", "--batch-size", "32", "--fsdp", "--no-keep-best"]
    for attempt in range(3):
        folder = tmp_path / f"two-{attempt}"
        ended = run_together([PROGRAM, DYING], [*flags, "--save-every", "0", "--output", str(folder)])
        if ended:
            break
    (code, output, error), (killed, silent, _) = ended
    assert killed == -signal.SIGKILL
    # The surviving process prints, and ends with a one-line error.
    assert "epoch   2/3" in output
    assert "epoch   2/3" not in silent
    assert code == 2, error
    assert "error: another process of this run has ended" in error
    assert "Traceback" not in error
    # One process with two devices resumes from their checkpoint and ends bitwise equal to an uninterrupted run.
    assert main([*flags, "--devices", "2", "--output", str(folder), "--resume"]) == 0
    assert main([*flags, "--devices", "2", "--output", str(tmp_path / "whole")]) == 0
    assert as_bytes(last_state(folder, epochs=3)) == as_bytes(last_state(tmp_path / "whole", epochs=3))
    assert metrics_of(folder) == metrics_of(tmp_path / "whole")
