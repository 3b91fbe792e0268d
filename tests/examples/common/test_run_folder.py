"""A run knows its flags and its data: it resumes by its folder alone, and not with other data."""

from __future__ import annotations

import json
import shlex
import shutil
import signal

import pytest

from examples.common.checkpoints import newest_position
from examples.custom.__main__ import main
from examples.imagenet.config import Config
from examples.imagenet.decoding import View
from examples.imagenet.image_folder import open_image_folder
from examples.imagenet.train import main as train_images
from tests.examples import processes
from tests.examples.common.test_records import FORMATS, rows_of
from tests.examples.errors import line_of_error
from tests.examples.imagenet.image_tree import CLASSES
from tests.examples.imagenet.runs import folder_flags, make_quick

pytestmark = pytest.mark.usefixtures("quick_programs")

FLAGS = ["--epochs", "2", "--devices", "1", "--batch-size", "128", "--seed", "7", "--policy", "float32", "--keep", "1"]


@pytest.fixture(scope="module")
def interrupted(quick_programs, tmp_path_factory):
    """A run of two epochs, stopped in its second, with a write that was killed."""
    output = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        processes.interrupt_at(patch, 5)
        assert main([*FLAGS, "--output", str(output)]) == 128 + signal.SIGTERM
    (output / "checkpoints" / "9.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    return output


@pytest.fixture
def run(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "run")


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_run_resumes_by_its_folder_alone(run):
    before = config_of(run)
    assert main(["--resume", "--output", str(run)]) == 0
    assert config_of(run) == before
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["policy"], summary["seed"], summary["batch_size"], summary["epochs"]) == ("float32", 7, 128, 2)
    steps = [path.name for path in (run / "checkpoints").iterdir() if path.name.isdecimal()]
    assert steps == ["6"]  # --keep 1
    assert not list(run.rglob("*tmp*"))


def test_flags_beside_resume_change_what_may_change_and_name_what_may_not(run, capsys):
    command = ["--resume", "--output", str(run)]
    assert "has --seed 7, but this command has 8" in line_of_error(main, [*command, "--seed", "8"], capsys)
    assert "--resume takes the flags of the run" in line_of_error(
        main, [*command, "--config", str(run / "config.json")], capsys
    )
    assert config_of(run)["seed"] == 7
    assert main([*command, "--epochs", "3", "--policy", "mixed_bfloat16"]) == 0
    assert (config_of(run)["epochs"], config_of(run)["policy"]) == (3, "mixed_bfloat16")


def test_a_new_run_takes_the_flags_of_another(run, tmp_path, capsys):
    command = ["--config", str(run / "config.json"), "--output", str(tmp_path / "new"), "--keep", "2"]
    assert main(command) == 0
    assert config_of(tmp_path / "new") == config_of(run) | {"keep": 2}
    (tmp_path / "empty.json").touch()
    error = line_of_error(main, ["--config", str(tmp_path / "empty.json")], capsys)
    assert "is not the config.json of a run" in error
    (tmp_path / "other.json").write_text('{"script": "speech"}')
    assert "holds a run of examples.speech" in line_of_error(main, ["--config", str(tmp_path / "other.json")], capsys)


def test_the_printed_command_continues_a_run_that_took_the_flags_of_another(run, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        processes.interrupt_at(patch, 1)
        command = ["--config", str(run / "config.json"), "--output", str(tmp_path / "new")]
        assert main(command) == 128 + signal.SIGTERM
    *_, printed = capsys.readouterr().out.splitlines()
    assert main(shlex.split(printed)[3:]) == 0  # without `python -m examples.custom`
    assert config_of(tmp_path / "new") == config_of(run)


def test_the_default_learning_rate_of_a_run_still_follows_the_batch_size(tmp_path):
    settings = Config(recipe="imagenet", batch_size=512).settings()
    assert settings["learning_rate"] == 0.512
    like = Config.like(settings, tmp_path, ())
    assert (Config(**like).learning_rate, Config(**like).momentum) == (0.512, 0.875)
    assert Config(**{**like, "batch_size": 1024}).learning_rate == 1.024
    given = Config(recipe="imagenet", batch_size=512, learning_rate=0.256).settings()
    assert Config(**Config.like(given, tmp_path, ())).learning_rate == 0.256


@pytest.mark.parametrize("content", ["", "{", "[]", '{"script"'])
def test_damaged_files_are_named_and_the_intact_checkpoint_is_used(run, content, capsys):
    settings = config_of(run)
    for name in ("config.json", "data.json", "summary.json", "metrics.jsonl"):
        (run / name).write_text(content)
    assert main(["--resume", "--output", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"{run / 'config.json'} can't be read" in said
    assert f"{run / 'summary.json'} can't be read" in said
    assert config_of(run) == settings
    assert [json.loads(line)["epoch"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert json.loads((run / "summary.json").read_text())["epochs"] == 2


def test_a_damaged_record_is_no_source_of_flags(run):
    assert newest_position(run / "checkpoints")["settings"]["seed"] == 7
    for path in run.glob("checkpoints/*/record/metadata"):
        path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))
    assert newest_position(run / "checkpoints") == {}
    assert newest_position(run / "none") == {}


def test_a_reordered_list_of_classes_is_refused(own_photos, tmp_path, monkeypatch, capsys):
    """Its weights would be read as those of other classes."""
    make_quick(monkeypatch)
    write, image, label = FORMATS["webdataset"]
    pairs = zip(("train", "val"), open_image_folder(own_photos, View(16), 0.0), strict=True)
    write(tmp_path / "data", {split: rows_of(images, image, label) for split, images in pairs}, CLASSES)
    flags = folder_flags(tmp_path / "data", "--output", str(tmp_path / "run"))
    assert train_images(flags) == 0
    moved = (tmp_path / "data").rename(tmp_path / "moved")
    command = ["--output", str(tmp_path / "run"), "--resume", "--data-dir", str(moved)]
    assert train_images([*command, "--epochs", "2"]) == 0  # the same data at another path
    (moved / "labels.txt").write_text("\n".join(reversed(CLASSES)))
    for more in (["--epochs", "3"], ["--export", "float32"]):  # Of a finished run, too.
        error = line_of_error(train_images, [*command, *more], capsys)
        assert "the classes differ (number 1 is 'china' in the run, 'flower' here)" in error
    assert json.loads((tmp_path / "run" / "data.json").read_text())["classes"] == [*CLASSES]
