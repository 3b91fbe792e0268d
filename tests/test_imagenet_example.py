"""The image training example: its outputs, bad input, and that a resumed run is the same run."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from image_tree import make_photo_tree
from measures import half_share
from PIL import Image

from examples.common import loop
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.devices import DataParallel
from examples.common.interruption import Interruption
from examples.imagenet import models, seeds, task, training
from examples.imagenet.__main__ import main
from examples.imagenet.config import Config
from examples.imagenet.data import Batch, Digits
from examples.imagenet.task import ImageTask, open_data

REPOSITORY = Path(__file__).parents[1]


class FewDigits(Digits):
    """The first 96 digits: two epochs of three steps take no time."""

    def __len__(self) -> int:
        return min(96, super().__len__())


@pytest.fixture(autouse=True, scope="module")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs of the same flags are the same program: compile it once."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("cache")))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model with one narrow block in two stages: most of a test's time is compilation."""
    monkeypatch.setitem(models.KINDS, "resnet8", models._resnet(models.BasicBlock, 1, 1, width=4))


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "Digits", FewDigits)


@pytest.fixture
def own_photos(tmp_path: Path) -> Path:
    """A tree of photographs for a test to spoil."""
    return make_photo_tree(tmp_path / "photos")


def folder_flags(root: Path, *flags: str) -> list[str]:
    return [
        "--data-dir",
        str(root),
        "--image-size",
        "16",
        "--model",
        "resnet8",
        "--batch-size",
        "4",
        "--epochs",
        "1",
        "--devices",
        "1",
        *flags,
    ]


def digit_flags(output: Path, *flags: str) -> list[str]:
    return ["--epochs", "2", "--batch-size", "32", "--devices", "1", "--output", str(output), *flags]


def digits_task(**flags: Any) -> ImageTask:
    """What a run with these flags trains, on one device."""
    config = Config(**flags)
    return ImageTask(config, *open_data(config), DataParallel(1))


def state_and_batch(made: ImageTask) -> tuple[training.TrainState, Batch]:
    batch = next(made.batches(0, 0))
    made.close()
    return made.initial_state(), batch


def final_state(output: Path) -> list[np.ndarray]:
    """Every array of the newest checkpoint, as bytes that a comparison can not round."""
    config = json.loads((output / "config.json").read_text())
    made = digits_task(policy=config["policy"])
    with Checkpoints(output / "checkpoints") as checkpoints:
        restored = checkpoints.restore(lambda position: made.abstract_state())
    assert restored is not None
    state, _ = restored
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake ends in, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(lines) == 1
    return lines[0]


# Runs.


def test_masked_entries_change_no_total():
    logits = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    losses, labels = np.array([1, 2, np.inf, np.nan], np.float32), np.argmax(logits, axis=1)
    totals = training.Totals.zero().add(losses, logits, labels, np.array([1, 0, 1, 1], np.float32))
    assert totals.means() == (1.0, 1.0)
    assert np.isnan(training.Totals.zero().means()).all()


def test_run_leaves_all_its_outputs(few_digits, tmp_path, capsys):
    output = tmp_path / "run"
    assert main(digit_flags(output, "--seed", "7")) == 0
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
    with Image.open(output / "curves.png") as plot:
        assert min(plot.size) > 300
    assert (output / "checkpoints" / "6").is_dir()


def test_second_run_never_overwrites_the_first(few_digits, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--epochs", "1", "--batch-size", "96"]
    assert main(flags) == main(flags) == 0
    assert sorted(path.name for path in Path("runs/imagenet").iterdir()) == ["0001", "0002"]
    capsys.readouterr()
    error = error_of([*flags, "--output", "runs/imagenet/0001"], capsys)
    assert "'runs/imagenet/0001' is not empty" in error
    assert "--resume" in error
    # Resuming what has finished says so and changes nothing.
    assert main([*flags, "--output", "runs/imagenet/0001", "--resume"]) == 0
    assert "already finished" in capsys.readouterr().out
    assert "--epochs 1, this command has 3" in error_of(
        ["--epochs", "3", "--batch-size", "96", "--output", "runs/imagenet/0001", "--resume"], capsys
    )


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "O0", "O1", "O2", "O3", "p=bf16"])
def test_every_policy_trains_without_nan(policy, tmp_path, few_digits, capsys):
    assert main(digit_flags(tmp_path / "run", "--policy", policy, "--epochs", "1")) == 0
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert np.isfinite([line["train_loss"], line["test_loss"]]).all()
    assert line["skipped_steps"] == 0
    assert line["loss_scale"] == (2.0**15 if policy in ("mixed_float16", "O1", "O2", "O3") else 1.0)


@pytest.mark.parametrize("policy", ["mixed_float16", "O2"])
def test_train_step_is_traced_once_and_donates_its_state(policy):
    made = digits_task(policy=policy)
    state, batch = state_and_batch(made)
    first = jax.tree.leaves(state.params)[0]
    for _ in range(4):
        state, shown = made.training.train_step(state, batch)
    assert made.training.train_step._cache_size() == 1
    assert first.is_deleted()
    assert int(state.step) == 4
    assert np.isfinite(shown["totals"].means()).all()


@pytest.mark.parametrize(
    ("policy", "amp", "share"),
    [
        ("float32", "module", 0.0),
        ("float32", "autocast", 0.0),
        ("mixed_float16", "module", 1.0),
        ("mixed_float16", "autocast", 1.0),
        ("mixed_bfloat16", "module", 1.0),
        ("mixed_bfloat16", "autocast", 1.0),
        ("O2", "module", 1.0),
    ],
)
def test_all_convolutions_of_a_training_step_run_in_half(policy, amp, share):
    made = digits_task(policy=policy, amp=amp)
    assert half_share(made.training.train_step, *state_and_batch(made)) == share


def test_overflow_skips_the_step_and_keeps_the_batch_statistics():
    made = digits_task()
    state, batch = state_and_batch(made)
    before = jax.device_get(state)
    broken = Batch(np.full(batch.images.shape, np.nan, np.float32), batch.labels, batch.mask)
    state, shown = made.training.train_step(state, broken)
    after = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.batch_stats, before.batch_stats)
    assert int(shown["skipped_steps"]) == 1
    assert float(after.totals.images) == 0


def test_interrupted_and_resumed_run_ends_bitwise_equal(few_digits, tmp_path, monkeypatch, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(digit_flags(whole)) == 0
    real = loop._Run._save_or_stop

    def interrupt_at(call: int) -> None:
        """Before which of the looks for a signal it comes: three before steps, three in the evaluation, ..."""
        calls = iter(range(100))

        def look(self: loop._Run) -> None:
            if next(calls) == call:
                signal.raise_signal(signal.SIGTERM)
            real(self)

        monkeypatch.setattr(loop._Run, "_save_or_stop", look)

    flags = digit_flags(parts)
    for call in (1, 3):  # in the middle of the first epoch; then, two steps later, in its evaluation
        interrupt_at(call)
        assert main(flags) == 128 + signal.SIGTERM
        assert not (parts / "summary.json").exists()
        flags = digit_flags(parts, "--resume")
        assert f"python -m examples.imagenet {' '.join(flags)}\n" in capsys.readouterr().out
    interrupt_at(-1)
    assert main(flags) == 0
    assert final_state(whole) == final_state(parts)
    one, two = (
        [
            json.loads(line) | {"images_per_second": 0, "input_share": 0}
            for line in (path / "metrics.jsonl").read_text().splitlines()
        ]
        for path in (whole, parts)
    )
    assert one == two


def test_sigterm_saves_and_says_how_to_resume(tmp_path):
    command = [sys.executable, "-m", "examples.imagenet", "--epochs", "500", "--output", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert "stopped by SIGTERM" in out
    assert f"python -m examples.imagenet --epochs 500 --output {tmp_path / 'run'} --resume" in out
    assert "Traceback" not in err
    assert list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    assert (tmp_path / "run" / "curves.png").exists()


def test_second_signal_is_not_held_back():
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert interruption.exit_code == 130
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


def test_seeds_prints_a_table_and_reuses_finished_runs(few_digits, tmp_path, capsys):
    flags = ["--seeds", "0", "--policies", "O0", "O1", "O2", "--output", str(tmp_path), "--epochs", "1"]
    assert seeds.main(flags) == 0
    rows = (tmp_path / "results.md").read_text().splitlines()
    ways = [tuple(row.split(" | ")[:2]) for row in rows[2:]]
    assert ways == [("| O0", "module"), ("| O1", "module"), ("| O1", "autocast"), ("| O2", "module")]
    capsys.readouterr()
    assert seeds.main(flags) == 0
    assert capsys.readouterr().out.count("already finished") == 4
    assert (tmp_path / "results.md").read_text().splitlines() == rows


# Bad input: one line, exit code 2, the value quoted, a way out.


@pytest.mark.parametrize(
    ("flags", "quoted"),
    [
        (["--policy", "mixed_float17"], "'mixed_float17'"),
        (["--policy", "O2", "--amp", "autocast"], "--amp autocast keeps the parameters in float32"),
        (["--batch-size", "1438"], "--batch-size 1438 is larger than the data: digits has 1437"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--epochs", "-1"], "--epochs -1"),
        (["--learning-rate", "nan"], "--learning-rate nan"),
        (["--seed", "-3"], "--seed -3"),
        (["--image-size", "16"], "--image-size 16"),
        (["--data-dir", "no/such/folder"], "'no/such/folder' is not a folder"),
        (["--resume"], "--output DIR"),
        (["--resume", "--output", "no/such/run"], "'no/such/run' holds no run"),
        (["--output", "pyproject.toml"], "'pyproject.toml' is a file"),
        (["--output", "/proc/run"], "'/proc/run' cannot be written to"),
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
    for path in own_photos.rglob("*.*"):
        path.unlink()
    assert "no images" in error_of(folder_flags(own_photos), capsys)
    shutil.rmtree(own_photos / "val")
    (own_photos / "val").mkdir()
    assert "no class folders in 'val'" in error_of(folder_flags(own_photos), capsys)


def test_too_many_unreadable_images_are_an_error(own_photos, tmp_path, capsys):
    for index in (0, 2):
        next((own_photos / "train" / "china").glob(f"{index}.*")).write_bytes(b"no image")
    error = error_of(folder_flags(own_photos, "--output", str(tmp_path / "run")), capsys)
    assert "2 images can not be read" in error
    assert "--max-unreadable 0.01" in error
    assert str(own_photos / "train" / "china") in error


def test_diverged_training_is_told_in_one_line(few_digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FewDigits, "std", (0.0,))
    flags = digit_flags(tmp_path / "run", "--epochs", "60", "--batch-size", "96")
    error = error_of(flags, capsys)
    assert "diverged" in error
    assert "--learning-rate" in error


def test_checkpoint_of_another_model_is_refused(few_digits, tmp_path):
    assert main(digit_flags(tmp_path / "run", "--epochs", "1")) == 0
    other = digits_task(model="resnet20", batch_size=32)
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints, pytest.raises(UsageError, match="not of this"):
        other.restore(checkpoints)
