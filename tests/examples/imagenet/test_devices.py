"""The image example on several devices has the losses of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples.common.cli import UsageError
from examples.common.training import DataParallel, means
from examples.imagenet.train import main
from tests.examples.imagenet.runs import digit_flags, digits_task
from tests.examples.quick import compiled_steps

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


def test_each_program_is_compiled_once(tmp_path, caplog):
    with compiled_steps(caplog) as compiled:
        assert main(digit_flags(tmp_path / "run", "--devices", "2", "--fsdp", "--ema", "0.9")) == 0
    assert compiled == {"train_step": 1, "test_step": 1}


def test_indivisible_batches_are_refused():
    with pytest.raises(UsageError, match="--batch-size 30 cannot be divided among 4 devices"):
        DataParallel().check(30)
    with pytest.raises(UsageError, match="--devices 5"):
        DataParallel(5)
    # A model that was trained in any batches is tested in full ones.
    assert digits_task(4, batch_size=1, mode="evaluate", output=".").test_batch_size == 4
