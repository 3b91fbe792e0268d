"""The image example on several devices and in several processes: the losses of one device."""

from __future__ import annotations

import socket
import subprocess

import jax
import numpy as np
import pytest

from examples.common.cli import UsageError
from examples.common.devices import DataParallel
from examples.common.training import means
from examples.imagenet.__main__ import main
from tests.examples.imagenet.runs import digits_task, metrics_of, start

pytestmark = pytest.mark.usefixtures("quick_runs")


def test_four_devices_train_as_one_does_also_with_the_state_split():
    totals = {}
    for devices, fsdp in ((1, False), (4, False), (4, True)):
        task = digits_task(devices, policy="float32", epochs=1, fsdp=fsdp)
        state = task.initial_state()
        for batch in task.batches(0, 0):
            assert len(batch.images.sharding.device_set) == devices
            state, _ = task.training.train_step(state, batch)
        task.close()
        assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(state))
        split = {x.shape for x in jax.tree.leaves(state) if not x.is_fully_replicated}
        assert split == ({(3, 3, 1, 4), (3, 3, 4, 4), (4, 10), (4,)} if fsdp else set())
        totals[devices, fsdp] = list(means(state.totals).values())
    # Sums in another order, and nothing else.
    for key in ((4, False), (4, True)):
        np.testing.assert_allclose(totals[key], totals[1, False], rtol=1e-5)


def test_batches_that_can_not_be_shared_are_refused():
    with pytest.raises(UsageError, match="--batch-size 30 cannot be divided among 4 devices"):
        DataParallel().check(30)
    with pytest.raises(UsageError, match="--devices 5"):
        DataParallel(5)


def together(folder, flags):
    """The outputs of two processes that train together; None if they did not meet, as another test took their port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    shared = [*flags, "--coordinator", address, "--processes", "2", "--output", str(folder)]
    processes = [start(*shared, "--process-id", str(index)) for index in range(2)]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    except subprocess.TimeoutExpired:
        return None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


@pytest.mark.slow
def test_two_processes_with_the_state_split_train_as_one_does_and_one_goes_on(tmp_path):
    flags = ["--policy", "float32", "--epochs", "1", "--batch-size", "32"]
    for attempt in range(3):
        folder = tmp_path / f"two-{attempt}"
        outputs = together(folder, [*flags, "--fsdp"])
        if outputs:
            break
    # One of them speaks and writes.
    assert "test accuracy" in outputs[0][0]
    assert "test accuracy" not in outputs[1][0]
    assert main([*flags, "--devices", "1", "--output", str(tmp_path / "one")]) == 0
    two, one = (metrics_of(tmp_path / name)[0] for name in (folder.name, "one"))
    assert two["test_accuracy"] == one["test_accuracy"]
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-5)
    assert (folder / "checkpoints" / "3").is_dir()
    # The one checkpoint of both is resumed by one process, which holds all of the state.
    for name in (folder.name, "one"):
        resumed = [*flags, "--epochs", "2", "--devices", "1", "--resume", "--output", str(tmp_path / name)]
        assert main(resumed) == 0
    two, one = (metrics_of(tmp_path / name)[1] for name in (folder.name, "one"))
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
