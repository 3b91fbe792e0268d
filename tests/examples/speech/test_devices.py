"""The speech example on several devices and in several processes: the losses of one device."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from examples.common.devices import DataParallel
from examples.speech.config import Config
from examples.speech.task import SpeechTask, open_alphabet, open_data
from tests.examples.processes import together

pytestmark = pytest.mark.usefixtures("stored_programs")
# Of all layers one kind: most of a test's time is compilation.
MODEL = {"hidden": 8, "context": 1, "stride": 2, "cell": "rnn", "bidirectional": False, "layer_norm": False}
RUN = {"mode": "train", "policy": "float32", "batch_size": 4, "buckets": 1, "epochs": 1, "augment": False}
PROGRAM = "import sys; from examples.speech.__main__ import main; sys.exit(main(sys.argv[1:]))"


def trained(devices: int, data: dict, **flags) -> tuple[list[float], set[tuple[int, ...]]]:
    """The sum of the losses after each step of an epoch, and the shapes of what is split over the devices."""
    config = Config(**MODEL, **RUN, **data, **flags)
    task = SpeechTask(config, DataParallel(devices, config.fsdp), open_alphabet(config), **open_data(config))
    state, losses = task.initial_state(), []
    for batch in task.batches(0, 0):
        state, shown = task.training.train_step(state, task.put(batch))
        losses.append(float(shown["totals"]["loss"]))
    leaves = jax.tree.leaves(state)
    assert all(len(x.sharding.device_set) == devices for x in leaves)
    if devices > 1 and not config.fsdp:
        assert np.isfinite(task.test(task.training.weights(state))["test_loss"])
    return losses, {x.shape for x in leaves if not x.is_fully_replicated}


@pytest.fixture(scope="module")
def one_device(data):
    losses, split = trained(1, data)
    assert not split
    return losses


@pytest.mark.parametrize("fsdp", [False, True])
def test_four_devices_train_as_one_does_also_with_the_state_split(one_device, data, fsdp):
    losses, split = trained(4, data, fsdp=fsdp)
    # Sums in another order, and nothing else: the same audio, dropout and orthogonal kernels.
    np.testing.assert_allclose(losses, one_device, rtol=1e-5)
    assert ({(8, 8), (3, 40, 8), (8,), (8, 29)} <= split) if fsdp else not split


@pytest.mark.slow
def test_two_processes_with_the_state_split_train_as_one_device_does(one_device, data, tmp_path):
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in (MODEL | RUN | data).items() if value is not False
    ]
    flags += [f"--no-{name.replace('_', '-')}" for name, value in (MODEL | RUN).items() if value is False]
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        ended = together([PROGRAM] * 2, [*flags, "--fsdp", "--output", str(folder)])
        if ended:
            break
    assert [code for code, *_ in ended] == [0, 0], ended
    (line,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert line["train_loss"] == pytest.approx(one_device[-1] / 8, rel=1e-5)
