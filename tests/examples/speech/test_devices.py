"""The speech example on several devices has the losses of one device."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.examples.speech.runs import task_of

pytestmark = pytest.mark.usefixtures("quick_programs")


def trained(devices, data, **flags):
    """The sum of the losses after each step of an epoch, the test metrics after it, and the state."""
    task = task_of(data, devices, policy="float32", **flags)
    state, losses = task.initial_state(), []
    for batch in task.batches(0, 0):
        state, outputs = task.training.train_step(state, batch)
        losses.append(float(outputs["totals"]["loss"]))
    assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(state))
    return losses, task.test(task.training.weights(state), lambda: None), state


@pytest.fixture(scope="module")
def one_device(data):
    return trained(1, data)


def test_four_devices_with_sharded_state_train_and_test_like_one(one_device, data):
    losses, tested, state = trained(4, data, fsdp=True)
    # Only the order of sums differs: audio, dropout and orthogonal kernels are the same.
    np.testing.assert_allclose(losses, one_device[0], rtol=1e-5)
    assert tested["test_loss"] == pytest.approx(one_device[1]["test_loss"], rel=1e-5)
    split = {x.shape for x in jax.tree.leaves(state) if not x.is_fully_replicated}
    assert {(8, 8), (3, 40, 8), (8,), (8, 29)} <= split
