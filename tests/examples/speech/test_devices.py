"""The speech example on several devices has the losses of one device; several processes load parts of a batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from examples.speech.batching import Buckets
from tests.examples.speech.runs import task_of

pytestmark = pytest.mark.usefixtures("stored_programs")


def trained(devices, data, **flags):
    """The sum of the losses after each step of an epoch, the test metrics after it, and the state."""
    task = task_of(data, devices, policy="float32", **flags)
    state, losses = task.initial_state(), []
    for batch in task.batches(0, 0):
        state, outputs = task.training.train_step(state, task.put(batch))
        losses.append(float(outputs["totals"]["loss"]))
    assert all(len(x.sharding.device_set) == devices for x in jax.tree.leaves(state))
    return losses, task.test(task.training.weights(state)), state


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


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_processes_load_parts_of_one_batch(data, monkeypatch, split):
    task = task_of(data, augment=True)
    buckets = Buckets(task.train_set, 4, task.config.front_end, 1, task.config.perturbation)
    batches = lambda: list(buckets.train_batches(0, 0) if split == "train" else buckets.evaluation_batches())
    whole = batches()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    parts = []
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(batches())
    # In the order of the processes, as `DataParallel.put` joins them.
    joined = [jax.tree.map(lambda *x: np.concatenate(x), *both) for both in zip(*parts, strict=True)]
    assert len(whole) == 2
    jax.tree.map(np.testing.assert_array_equal, joined, whole)
