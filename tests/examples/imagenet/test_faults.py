"""Faults around a training: other data, damaged files, lack of memory, signals, flags without effect."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from examples.common import loop
from examples.common.cli import UsageError
from examples.common.flags import parse
from examples.common.modes import open_model
from examples.common.run_folder import RunFolder, to_json
from examples.common.training import Variables
from examples.common.weights import open_arrays, write_weights
from examples.imagenet import train as image_task
from examples.imagenet.config import Config
from examples.imagenet.image_folder import list_tree
from examples.imagenet.train import ImageTask, main
from tests.examples.imagenet.runs import FewDigits, digit_flags, digits_task, error_of, folder_flags

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def trained(quick_runs, tmp_path_factory):
    """The folder of a finished run of one epoch."""
    output = tmp_path_factory.mktemp("trained") / "run"
    assert main(digit_flags(output, "--epochs", "1")) == 0
    return output


# Wrong results.


def test_model_is_not_tested_on_other_classes(trained, monkeypatch, capsys):
    monkeypatch.setattr(FewDigits, "classes", tuple("abcdefghij"))
    error = error_of(["--mode", "evaluate", "--output", str(trained), "--devices", "1"], capsys)
    assert "the model has the classes '0', '1'" in error


def test_model_is_tested_on_the_images_that_the_flags_name(trained, own_photos, tmp_path, capsys):
    """Regardless of the training data: `--dataset` or `--data-dir`."""
    flags = ["--mode", "evaluate", "--devices", "1", "--output"]
    error = error_of([*flags, str(trained), "--dataset", "mnist"], capsys)
    assert "the model takes images of (8, 8, 1), but mnist has (28, 28, 1)" in error
    smaller = parse(Config, "imagenet", [*flags, str(trained), "--batch-size", "7"])
    assert open_model(smaller, ImageTask)[0].config.batch_size == 7
    of_mnist = tmp_path / "run"
    shutil.copytree(trained, of_mnist)
    settings = json.loads((of_mnist / "config.json").read_text())
    (of_mnist / "config.json").write_text(json.dumps(settings | {"dataset": "mnist"}))
    error = error_of([*flags, str(of_mnist), "--data-dir", str(own_photos)], capsys)
    assert "the model has the classes '0', '1'" in error


def test_testing_needs_no_training_data(trained, monkeypatch, capsys):
    opened = []
    real = image_task._open
    monkeypatch.setattr(image_task, "_open", lambda c, s, *k: opened.append(s) or real(c, s, *k))
    assert main(["--mode", "predict", "--output", str(trained), "--devices", "1"]) == 0
    assert opened == [["val"]]
    first = json.loads((trained / "predictions.json").read_text())["predictions"][0]
    assert first["image"] == "test digit 0"
    assert first["truth"] == str(digits_task().test_set.load(np.arange(1), None).labels[0])


# Lost work.


def test_only_one_process_trains_in_a_folder(tmp_path):
    config = {"script": "imagenet"}
    refused = pytest.raises(UsageError, match="another process is training there")
    with RunFolder.create(tmp_path / "run", tmp_path, config), refused:
        RunFolder.reopen(tmp_path / "run", config)
    RunFolder.reopen(tmp_path / "run", config).close()


def test_run_with_too_many_bad_images_resumes_with_another_limit(own_photos, tmp_path, capsys):
    for path in sorted((own_photos / "train" / "china").iterdir())[:2]:
        path.write_bytes(b"no image")
    flags = folder_flags(own_photos, "--output", str(tmp_path / "run"))
    error = error_of(flags, capsys)
    assert "2 of 12 files can't be used" in error
    assert "--max-unreadable 0.01" in error
    assert str(own_photos / "train" / "china") in error
    assert main([*flags, "--resume", "--max-unreadable", "0.5"]) == 0


def test_finished_run_continues_to_more_epochs(trained, tmp_path, capsys):
    output = shutil.copytree(trained, tmp_path / "run")
    assert main(digit_flags(output, "--resume", "--epochs", "2")) == 0
    assert json.loads((output / "summary.json").read_text())["epochs"] == 2
    assert "already finished" not in capsys.readouterr().out


# One line instead of a traceback.


def test_lack_of_memory_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def compile(self):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    monkeypatch.setattr(ImageTask, "compile", compile)
    error = error_of(digit_flags(tmp_path / "run"), capsys)
    assert "out of memory at --batch-size 32, --policy mixed_float16: use a smaller one" in error


def test_folders_of_another_script_or_version_are_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"script": "speech"}')
    flags = ["--output", str(tmp_path)]
    assert "holds a run of examples.speech" in error_of([*flags, "--resume"], capsys)
    (tmp_path / "config.json").write_text("{}")
    assert "holds a run of an older version" in error_of([*flags, "--mode", "evaluate"], capsys)


def test_full_disk_and_interruption_end_in_one_line(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("examples.common.modes.run", full)
    assert "metrics.jsonl: No space left on device" in error_of([], capsys)

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("examples.common.modes.run", stopped)
    assert main([]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().out


def test_weights_file_is_checked_before_it_is_read(trained, tmp_path, capsys, monkeypatch):
    settings = json.loads((trained / "config.json").read_text())
    description = json.loads((trained / "data.json").read_text())
    file = tmp_path / "weights.safetensors"
    flags = ["--mode", "predict", "--weights", str(file), "--output", str(tmp_path / "new"), "--devices", "1"]

    def written(**changed):
        about = {"settings": {**settings, **changed.pop("settings", {})}, "data": {**description, **changed}}
        write_weights(file, Variables({"w": jnp.zeros(3)}, {}), about)
        return error_of(flags, capsys)

    assert "--model 'resnet9000'" in written(settings={"model": "resnet9000"})
    (tmp_path / "planted.py").write_text("import pathlib; pathlib.Path('ran').touch(); Net = None")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert "if you trust it, give --model planted:Net" in written(settings={"model": "planted:Net"})
    assert not (tmp_path / "ran").exists()  # A file's word is not imported.
    assert "description of its images is damaged" in written(image_shape=[10**6, 10**6, 3])
    assert "lacks 'params/" in written()
    assert "of examples.speech" in written(settings={"script": "speech"})
    file.write_bytes(file.read_bytes()[:40])
    assert "was not written by --export" in error_of(flags, capsys)


def test_arrays_of_another_shape_are_not_read(tmp_path):
    path = tmp_path / "file.safetensors"
    save_file({"w": np.zeros((4, 4), np.float32)}, path)
    like = Variables({"w": jnp.zeros((4, 5))}, {})
    with pytest.raises(UsageError, match=r"'w' has shape \(4, 4\), which does not fit \(4, 5\)"):
        open_arrays(path, "--init-from").variables(like)
    read = open_arrays(path, "--init-from").variables(Variables({"w": jnp.zeros((4, 4))}, {}))
    np.testing.assert_array_equal(read.params["w"], 0)


# Nothing is ignored silently.


def test_images_of_all_formats_count_and_other_files_are_reported(own_photos, capsys):
    folder = own_photos / "train" / "china"
    with Image.open(next(folder.iterdir())) as image:
        for ending in ("webp", "bmp", "jpe"):
            image.convert("RGB").save(folder / f"more.{ending}", format={"jpe": "JPEG"}.get(ending))
    before = len(list_tree(own_photos)[1][0])
    (folder / "notes.txt").write_text("no image")
    assert len(list_tree(own_photos)[1][0]) == before
    assert " .txt" in capsys.readouterr().err
    assert {"more.webp", "more.bmp", "more.jpe"} <= {
        path.rsplit("/")[-1] for path, _ in list_tree(own_photos)[1][0].entries
    }


def test_class_without_test_images_is_refused(own_photos):
    (own_photos / "train" / "empty").mkdir()
    shutil.copy(next((own_photos / "train" / "china").iterdir()), own_photos / "train" / "empty")
    (own_photos / "val" / "empty").mkdir()
    with pytest.raises(UsageError, match="'empty' of val"):
        list_tree(own_photos)


@pytest.fixture
def diverging(monkeypatch):
    """Makes every gradient NaN from the first step."""
    real = ImageTask.start_state
    nan = lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding)
    broken = lambda self: (state := real(self))._replace(params=jax.tree.map(nan, state.params))
    monkeypatch.setattr(ImageTask, "start_state", broken)


def test_fixed_loss_scale_that_skips_everything_is_an_error(diverging, tmp_path, capsys):
    error = error_of(digit_flags(tmp_path / "run", "--policy", "float32", "--epochs", "1"), capsys)
    assert "all 3 steps of epoch 1 were skipped" in error
    assert "at the fixed loss scale 1. Give a lower --learning-rate" in error


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")  # As by `write`, which names no file.

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*metrics\.jsonl"):
        RunFolder(tmp_path).write_metrics([])


def test_diverged_training_is_reported_in_one_line(diverging, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "_MAX_SKIPS", 4)  # of the six steps
    error = error_of(digit_flags(tmp_path / "run"), capsys)
    assert "training diverged in epoch 2" in error
    assert "--learning-rate" in error


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["--no-flip"], "--flip"),
        (["--test-crop", "1"], "--test-crop"),
        (["--data-dir", "x", "--whole", "--test-crop", "1"], "--test-crop"),
        (["--mode", "train", "--patience", "3"], "--patience"),
        (["--audit", "--profile"], "--profile"),
        (["--audit", "--mode", "evaluate"], "--audit"),
        (["--audit", "--mode", "inference_benchmark"], "--audit"),
        (["--warmup-epochs", "5", "--epochs", "2"], "--warmup-epochs 5.0: above half of --epochs 2"),
    ],
)
def test_flags_without_effect_are_refused(flags, flag, capsys):
    error = error_of(flags, capsys)
    assert flag in error
    assert len(error) < 200


def test_json_is_valid():
    assert to_json({"loss": float("nan"), "list": [float("inf"), 1]}) == '{"loss": null, "list": [null, 1]}'


def test_metrics_are_readable_if_every_loss_is_non_finite(tmp_path):
    with RunFolder.create(tmp_path / "run", tmp_path, {}) as folder:
        folder.write_metrics([{"epoch": 1, "train_loss": float("nan")}])
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"epoch": 1, "train_loss": null}\n'
