"""What the speech script shares with the image script: precision changes, devices, export, inspection, a dev set."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile

from examples.common import loop
from examples.common.devices import DataParallel
from examples.common.precision_change import float32_params
from examples.speech.__main__ import main
from examples.speech.config import Config
from examples.speech.task import SpeechTask, open_alphabet, open_data
from tests.examples.speech.test_script import TINY, data_flags, error_of, small  # noqa: F401

pytestmark = pytest.mark.usefixtures("stored_programs")


def task_of(data, **flags):
    """The task of tiny flags on tones."""
    config = Config(**{**small(data), **flags})
    return SpeechTask(config, DataParallel(1), open_alphabet(config), **open_data(config))


@pytest.fixture(scope="module")
def interrupted(data_flags, tmp_path_factory):  # noqa: F811
    """The folder of a run in O2 that was stopped in its second epoch."""
    output = tmp_path_factory.mktemp("runs") / "O2"
    steps, real = iter(range(100)), loop._Run._save_or_stop

    def look(self):
        if next(steps) == 4:  # after two steps and a test
            signal.raise_signal(signal.SIGTERM)
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "_save_or_stop", look)
        assert main([*TINY, *data_flags, "--output", str(output), "--policy", "O2"]) == 128 + signal.SIGTERM
    return output


def test_resume_may_change_the_precision_but_not_the_data(interrupted, data_flags, tmp_path, capsys):  # noqa: F811
    output = shutil.copytree(interrupted, tmp_path / "run")
    other = shutil.copytree(Path(data_flags[1]).parent, tmp_path / "data")
    moved = ["--train-data", str(other / "train.csv"), "--test-data", str(other / "test.csv")]
    flags = [*TINY, "--output", str(output), "--policy", "mixed_float16", "--resume"]
    assert "--test-data" in error_of([*flags, *moved], capsys)
    samples, rate = soundfile.read(other / "train3.wav")
    soundfile.write(other / "train3.wav", samples * 0.5, rate)
    settings = json.loads((output / "config.json").read_text()) | {
        name: str(other / f"{split}.csv") for name, split in (("train_data", "train"), ("test_data", "test"))
    }
    (output / "config.json").write_text(json.dumps(settings))
    assert "--train-data" in error_of([*flags, *moved], capsys)
    (output / "config.json").write_text((interrupted / "config.json").read_text())
    assert main([*flags, *data_flags]) == 0
    assert "from policy O2 to mixed_float16" in capsys.readouterr().out
    assert json.loads((output / "summary.json").read_text())["policy"] == "mixed_float16"


def test_training_starts_from_the_masters_of_a_run(interrupted, data_flags):  # noqa: F811
    old = task_of(data_flags, policy="O2")
    with loop.Checkpoints(interrupted / "checkpoints") as checkpoints:
        before, _ = old.restore_as_saved(checkpoints)
    started = task_of(data_flags, init_from=interrupted).start_state()
    for one, two in zip(jax.tree.leaves(float32_params(before)), jax.tree.leaves(started.params), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_dev_set_export_average_and_files(data_flags, tmp_path, capsys):  # noqa: F811
    output, folder = tmp_path / "run", Path(data_flags[3]).parent
    flags = [*TINY, *data_flags, "--dev-data", data_flags[3], "--output", str(output), "--epochs", "1"]
    assert main([*flags, "--export", "bfloat16", "--ema", "0.9", "--accumulate", "2", "--loss-scale", "0.25"]) == 0
    line = json.loads((output / "metrics.jsonl").read_text())
    summary = json.loads((output / "summary.json").read_text())
    assert "wer" not in line
    assert {"dev_wer", "dev_cer"} <= set(line)
    assert {"wer", "dev_wer", "export_dev_wer"} <= set(summary)
    assert summary["loss_scale"] == 0.25
    assert (output / "best").is_dir()
    capsys.readouterr()
    weights = str(output / "weights_bfloat16.safetensors")
    audio = [str(folder / f"test{index}.wav") for index in range(3)]
    assert main(["--weights", weights, "--policy", "mixed_bfloat16", "--infer", *audio]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines[:3]] == audio


def test_step_is_audited(data_flags, capsys):  # noqa: F811
    assert main([*TINY, *data_flags, "--audit"]) == 0
    assert "float16" in capsys.readouterr().out


def test_longer_utterances_are_left_out_by_choice(data_flags):  # noqa: F811
    every = task_of(data_flags).train_set
    limit = float(np.sort(every.samples)[4]) / 16_000
    kept = task_of(data_flags, longest_seconds=limit).train_set
    assert len(kept) == 5
    assert len(kept.skipped) == 0


def test_mozillas_flags_are_understood(data_flags, capsys):  # noqa: F811
    flags = ["--train_files", data_flags[1], "--test_files", data_flags[3], "--n_hidden", "8"]
    error = error_of([*flags, "--automatic_mixed_precision", "--load_cudnn", "--batch_size", "99"], capsys)
    assert "--batch-size 99 is larger than the data" in error
