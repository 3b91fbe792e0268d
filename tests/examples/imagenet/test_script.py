"""Training by the image example: its outputs, precision, and bad input."""

from __future__ import annotations

import json
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from examples.common.loop import Interruption
from examples.common.run_folder import RunFolder
from examples.common.training import checked_sums, masked_sums, means
from examples.imagenet.__main__ import main
from testing.measures import half_share
from tests.examples.imagenet.runs import (
    digit_flags,
    digits_task,
    error_of,
    folder_flags,
    state_and_batch,
)

pytestmark = pytest.mark.usefixtures("quick_runs")


def events(folder: Path) -> Iterator[Event]:
    """The events in TensorBoard files: each record is a length, its checksum, an event and its checksum."""
    data = next(folder.iterdir()).read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


# Runs.


def test_masked_and_overflowed_entries_do_not_change_totals_of_training():
    losses = jnp.array([1, 2, np.inf, np.nan], np.float32)
    sums = masked_sums(jnp.array([1, 0, 1, 1]), loss=losses, accuracy=jnp.ones(4))
    assert means(sums) == {"loss": 1.0, "accuracy": 1.0}
    assert np.isnan(list(means({name: 0 * x for name, x in sums.items()}).values())).all()


def test_entries_without_finite_outputs_are_wrong():
    finite = jnp.array([True, True, False, False])
    sums = checked_sums(jnp.array([1, 1, 1, 0]), finite, loss=jnp.array([1, 3, np.nan, 9]), accuracy=jnp.ones(4))
    assert means(sums) == {"loss": 2.0, "accuracy": pytest.approx(2 / 3), "nonfinite": 1.0}


def test_run_writes_all_outputs_and_is_never_overwritten(tmp_path, capsys):
    output = tmp_path / "run"
    flags = digit_flags(output, "--seed", "7", "--log-every", "1")
    assert main(flags) == 0
    out = capsys.readouterr().out.splitlines()
    summary = json.loads((output / "summary.json").read_text())
    expected = {"policy": "mixed_float16", "seed": 7, "epochs": 2, "skipped_steps": 0, "train_images": 96}
    assert {name: summary[name] for name in expected} == expected
    assert summary["images_per_second"] > 0
    assert summary["loss_scale"] == 2.0**15
    assert out[-1].startswith(f"test accuracy {summary['test_accuracy']:.2%}, policy mixed_float16, ")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    assert [line["step"] for line in lines] == [3, 6]
    assert lines[-1]["test_accuracy"] == summary["test_accuracy"]
    assert (output / "checkpoints" / "6").is_dir()
    written = [v for event in events(output / "tensorboard") for v in event.summary.value]
    accuracies = [v.simple_value for v in written if v.tag == "test_accuracy"]
    assert accuracies == pytest.approx([line["test_accuracy"] for line in lines])
    assert [v.simple_value for v in written if v.tag == "step/loss_scale"] == [2.0**15] * 6
    # A second run is refused, --resume has nothing to do, and --resume with other flags is refused.
    error = error_of(flags, capsys)
    assert f"'{output}' is not empty" in error
    assert "--resume" in error
    assert main([*flags, "--resume"]) == 0
    assert "already finished" in capsys.readouterr().out
    assert "--batch-size 32, but this command has 16" in error_of([*flags, "--resume", "--batch-size", "16"], capsys)


def test_runs_without_a_folder_are_numbered(tmp_path):
    paths = []
    for _ in range(2):
        with RunFolder.create(None, tmp_path, {"seed": 0}) as folder:
            paths.append(folder.path)
    assert [path.name for path in paths] == ["0001", "0002"]
    assert json.loads((paths[1] / "config.json").read_text()) == {"seed": 0}


def test_half_throughout_trains_without_nan_and_train_mode_does_not_test(tmp_path, capsys):
    assert main(digit_flags(tmp_path / "run", "--policy", "O3", "--epochs", "1", "--mode", "train")) == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert np.isfinite(line["train_loss"])
    assert (line["skipped_steps"], line["loss_scale"]) == (0, 2.0**15)
    assert "test_loss" not in line
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"train accuracy {line['train_accuracy']:.2%}, ")


def test_train_step_is_traced_once_donates_its_state_and_skips_completely():
    task = digits_task(policy="O2", ema=0.9, accumulate=2, mixup=0.2)
    state, batch = state_and_batch(task)
    first = jax.tree.leaves(state.params)[0]
    for _ in range(3):
        state, outputs = task.training.train_step(state, batch)
    assert first.is_deleted()
    assert int(state.step) == 3
    assert np.isfinite(means(outputs["totals"])["loss"])
    # If the loss scale overflows, only the counts change.
    before = jax.device_get(state)
    huge = jax.device_put(np.float32(2.0**120), state.step.sharding)
    state = state._replace(opt_state=state.opt_state._replace(loss_scale=huge))
    state, outputs = task.training.train_step(state, batch)
    after = jax.device_get(state)
    for name in ("params", "stats", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    jax.tree.map(np.testing.assert_array_equal, after.opt_state.inner_state, before.opt_state.inner_state)
    assert int(outputs["skipped_steps"]) == 1
    assert task.training.train_step._cache_size() == 1


@pytest.mark.parametrize(
    ("policy", "amp", "share"),
    [
        ("float32", "autocast", 0.0),
        ("mixed_float16", "module", 1.0),
        ("mixed_float16", "autocast", 1.0),
        ("mixed_bfloat16", "autocast", 1.0),
        ("O2", "module", 1.0),
    ],
)
def test_all_convolutions_of_a_training_step_run_in_half(policy, amp, share):
    task = digits_task(policy=policy, amp=amp)
    assert half_share(task.training.train_step, *state_and_batch(task)) == share


def test_second_signal_is_not_intercepted():
    # Set Python's handler, because a process started in the background ignores the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.signal is signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_photos_train_and_unreadable_ones_are_named_and_counted(own_photos, tmp_path, capsys):
    (own_photos / "train" / "china" / "broken.jpg").write_bytes(b"")
    (own_photos / "val" / "china" / "broken.png").write_bytes(b"no image")
    assert main(folder_flags(own_photos, "--output", str(tmp_path / "run"))) == 0
    captured = capsys.readouterr()
    for split, name in (("train", "broken.jpg"), ("val", "broken.png")):
        assert captured.err.count(str(own_photos / split / "china" / name)) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["unreadable_images"] == 2
    assert (summary["train_images"], summary["test_images"]) == (13, 7)
    # Six of the seven test images count.
    assert summary["test_accuracy"] * 6 == pytest.approx(round(summary["test_accuracy"] * 6))


# Bad input: one line with the value and a remedy, and exit code 2.


@pytest.mark.parametrize(
    ("flags", "quoted"),
    [
        (["--policy", "mixed_float17"], "'mixed_float17'"),
        (["--policy", "mixed_float8"], "layers have no float8 matmuls; add --amp autocast"),
        (["--policy", "O2", "--amp", "autocast"], "--amp autocast keeps the parameters in float32"),
        (["--batch-size", "100"], "--batch-size 100 is larger than the data: digits has 96"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--epochs", "-1"], "--epochs -1"),
        (["--learning-rate", "nan"], "--learning-rate nan"),
        (["--seed", "-3"], "--seed -3"),
        (["--image-size", "16"], "--image-size 16"),
        (["--image-size", "5000"], "--image-size 5000: give 8 to 4096"),
        (["--data-dir", ".", "--test-crop", "0"], "--test-crop 0.0: give more than 0"),
        (["--dataset", "mnist", "--image-size", "8"], "--image-size 8: the images of mnist are 28x28"),
        (["--dataset", "mnist", "--data-dir", "photos"], "--dataset mnist: --data-dir photos would replace it"),
        (["--mode", "evaluate"], "add --output DIR or --weights FILE"),
        (["--mode", "training_benchmark", "--iter-unit", "epoch"], "--iter-unit: invalid choice: 'epoch'"),
        (["--mode", "training_benchmark", "--dataset", "mnist"], "leave out --data-dir and --dataset"),
        (["--loss-scale", "big"], "--loss-scale 'big'"),
        (["--loss-scale", "0"], "--loss-scale '0'"),
        (["--mode", "predict", "--output", "no/such/run"], "'no/such/run' holds no run"),
        (["--mode", "evaluate", "--weights", "no/such/file"], "'no/such/file'"),
        (["--devices", "9"], "--devices 9"),
        (["--ema", "1"], "--ema 1"),
        (["--data-dir", "no/such/folder"], "'no/such/folder' is not a folder"),
        (["--resume"], "--output DIR"),
        (["--resume", "--output", "no/such/run"], "'no/such/run' holds no run"),
        (["--output", "pyproject.toml"], "'pyproject.toml' is a file"),
        (["--output", "/proc/run"], "/proc/run: No such file or directory. Free disk space, or give a writable folder"),
    ],
)
def test_bad_flags_end_in_one_line(flags, quoted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").touch()
    assert quoted in error_of(flags, capsys)
    assert not Path("runs").exists()


def test_bad_trees_end_in_one_line(own_photos, capsys):
    (own_photos / "val" / "flowers").mkdir()
    assert "only in val: 'flowers'" in error_of(folder_flags(own_photos), capsys)
    (own_photos / "train" / "flowers").mkdir()
    assert "'flowers' of train" in error_of(folder_flags(own_photos), capsys)
    assert "no folder 'train'" in error_of(folder_flags(own_photos / "train"), capsys)
    for split, name in (("train", "china"), ("val", "china"), ("train", "flowers"), ("val", "flowers")):
        shutil.move(own_photos / split / name, own_photos / f"{split}-{name}")
    assert "has one class" in error_of(folder_flags(own_photos), capsys)
    for path in own_photos.rglob("*.*"):
        path.unlink()
    assert "no images" in error_of(folder_flags(own_photos), capsys)
    shutil.rmtree(own_photos / "val")
    (own_photos / "val").mkdir()
    assert "no class folders in 'val'" in error_of(folder_flags(own_photos), capsys)
