"""Two processes train like one with as many devices, decide together, and end together."""

from __future__ import annotations

import json
import signal
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from examples.common import processes as joined
from examples.common.checkpoints import Checkpoints
from examples.common.training import DataParallel
from examples.custom.__main__ import Batch, Config, CustomTask, main
from tests.examples import processes
from tests.examples.errors import line_of_error

pytestmark = pytest.mark.usefixtures("quick_programs")

# One entry is out of float16's range, so each epoch has an overflow, which one process alone meets.
PROGRAM = """
import os, signal, sys, pytest
from examples.common import loop
from examples.custom.__main__ import main
from tests.examples import processes, quick
from tests.examples.common import test_processes
patch = pytest.MonkeyPatch()
quick.make_quick(patch)
test_processes.spoil(patch)
if "SIGNAL" in os.environ:
    processes.interrupt_at(patch, 2, int(os.environ["SIGNAL"]))
sys.exit(main(sys.argv[1:]))
"""
FLAGS = ["--epochs", "2", "--batch-size", "128", "--optimizer", "sgd"]


def spoil(patch):
    """Trains on as many made-up entries: the import of scikit-learn takes a third of a process's time."""

    def opened(*_):
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(569, 30)).astype(np.float32)
        labels = (inputs @ rng.normal(size=30) > 0).astype(np.int32)
        inputs[7] = 1e8
        return Batch(inputs[:426], labels[:426]), Batch(inputs[426:], labels[426:])

    patch.setattr(CustomTask, "open", opened)


@pytest.fixture(autouse=True)
def spoiled(monkeypatch):
    spoil(monkeypatch)


def state_of(output, **flags):
    config = Config(epochs=2, batch_size=128, optimizer="sgd", **flags)
    with Checkpoints(output / "checkpoints") as checkpoints:
        restored = CustomTask(config, DataParallel(), CustomTask.open(config)).restore_as_saved(checkpoints)
    return restored[0]


@pytest.fixture(scope="module")
def whole(quick_programs, tmp_path_factory):
    """A run of one process with four devices."""
    output = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch)
        assert main([*FLAGS, "--output", str(output)]) == 0
    return output


def assert_close(output, whole):
    """The sums over devices have another order: those of two processes are made in two stages."""
    found, expected = (state_of(path)._replace(totals=()) for path in (output, whole))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=1e-5, atol=1e-6)
    assert int(found.opt_state.skipped_steps) == int(expected.opt_state.skipped_steps) > 0


@pytest.mark.slow
def test_two_processes_train_like_one(whole, tmp_path):
    """With sharded state; the next test replicates it."""
    output = tmp_path / "run"
    (zero, out, _), (one, other, error) = processes.ends(
        processes.start_two(PROGRAM, *FLAGS, "--fsdp", "--output", str(output), "--export", "float32")
    )
    assert (zero, one) == (0, 0), error
    assert_close(output, whole)
    found, expected = (json.loads((path / "summary.json").read_text()) for path in (output, whole))
    assert found["test_accuracy"] == expected["test_accuracy"]  # Each entry counts once.
    assert found["devices"] == 4
    assert (output / "weights_float32.safetensors").is_file()
    assert "test accuracy" in out
    assert "test accuracy" not in other  # The first process prints.


@pytest.mark.exhaustive
def test_a_signal_to_any_process_saves_one_checkpoint_which_any_number_resumes(whole, tmp_path):
    output = tmp_path / "run"
    ended = processes.ends(
        processes.start_two(PROGRAM, *FLAGS, "--output", str(output), SIGNAL=str(int(signal.SIGTERM)))
    )
    assert [code for code, *_ in ended] == [128 + signal.SIGTERM] * 2
    assert "stopped by SIGTERM after step 3" in ended[0][1]  # All agree one step after it was asked for.
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["3"]
    with pytest.MonkeyPatch.context() as patch:  # One process with four devices, and back.
        processes.interrupt_at(patch, 1)
        assert main(["--resume", "--output", str(output)]) == 128 + signal.SIGTERM
    (zero, _, error), (one, *_) = processes.ends(processes.start_two(PROGRAM, "--resume", "--output", str(output)))
    assert (zero, one) == (0, 0), error
    assert_close(output, whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1])
def test_processes_end_with_one_line_when_another_is_killed(victim, tmp_path):
    started = processes.start_two(
        PROGRAM, *FLAGS, "--epochs", "2000", "--schedule", "constant", "--output", str(tmp_path / "run"),
        "--save-every", "0",
    )  # fmt: skip
    while not processes.newest(tmp_path / "run") and all(process.poll() is None for process in started):
        time.sleep(0.1)
    started[victim].kill()
    code, _, errors = processes.ends(started)[1 - victim]  # instead of waiting for ever
    assert "Traceback" not in errors
    if victim == 0 and "Terminating process because the JAX distributed service" in errors:
        return  # Without its service, a thread of JAX may be the first to end the process.
    assert code == 2, errors
    (line,) = (line for line in errors.splitlines() if ": error: " in line)
    assert "has ended; --resume continues from the last checkpoint" in line


class Silent(Exception):
    pass


@pytest.mark.parametrize(("second", "told"), [("7", "process 1"), ("failed", "process 1"), (None, "process 0, ")])
def test_a_silent_process_counts_as_dead_within_a_minute(second, told, monkeypatch):
    """On a clock of the test. Process 2 is done, and its silence means nothing."""
    clock = [0.0]

    class Store:
        def key_value_try_get(self, name):
            if second is None:
                raise OSError
            return "1"

        def key_value_set(self, name, value, allow_overwrite):
            self.own = value

        def key_value_dir_get(self, name):
            return [(f"{name}0", self.own), (f"{name}1", second), (f"{name}2", "done")]

    def end(program, who):
        raise Silent(who)

    store = Store()
    times = SimpleNamespace(sleep=lambda s: clock.append(clock[-1] + s), monotonic=lambda: clock[-1])
    for name, value in {"time": times, "_store": lambda: store, "process_id": lambda: 0, "end": end}.items():
        monkeypatch.setattr(joined, name, value)
    with pytest.raises(Silent, match=told):
        joined._watch("program")
    assert clock[-1] > 30 if second == "7" else clock[-1] < 5
    assert clock[-1] < 60  # instead of JAX's 100 s


@pytest.mark.slow
def test_a_mistake_of_one_process_is_told_once(tmp_path):
    output = tmp_path / "run"
    output.mkdir()
    (output / "something").touch()
    (zero, _, error), (one, _, other) = processes.ends(processes.start_two(PROGRAM, *FLAGS, "--output", str(output)))
    assert (zero, one) == (2, 2)
    assert error.count("is not empty; it may hold a run") == 1
    assert "error:" not in other


def test_a_single_process_in_a_cluster_is_refused(tmp_path, monkeypatch, capsys):
    names = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")
    command = [*FLAGS, "--output", str(tmp_path / "run")]
    for name in names:
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            error = line_of_error(main, command, capsys)
        assert f"{name}=2, but this process has not joined any" in error
        assert "--coordinator HOST:PORT --num-processes N --process-id I" in error
    for name in names:
        monkeypatch.setenv(name, "2")
    assert main([*command, "--num-processes", "1"]) == 0
    assert "need --coordinator, --process-id too" in line_of_error(main, [*command, "--num-processes", "2"], capsys)
