"""The speech training example: its outputs, a resumed run, other precisions, and bad flags."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import jax
import jiwer
import numpy as np
import pytest
import soundfile

from examples.common import loop
from examples.speech.__main__ import main
from examples.speech.dataset import ENGLISH
from tests.examples import processes
from tests.examples.quick import compiled_steps
from tests.examples.speech.runs import TINY, TINY_MODEL, as_bytes, as_flags, error_of, lines_of, task_of

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module")
def finished(data_flags, tmp_path_factory):
    """The folder of a finished run in mixed_float16."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*TINY, *data_flags, "--output", str(output)]) == 0
    return output


def checkpoint_of(output: Path, data: dict[str, Path]) -> list[bytes]:
    """Every array of the newest checkpoint."""
    with loop.Checkpoints(output / "checkpoints") as checkpoints:
        state, _ = task_of(data).restore_as_saved(checkpoints)
    # A checkpoint of the last step may be from before the end of its epoch, which resets the sums.
    return as_bytes(jax.tree.leaves(state._replace(totals=())))


def test_run_writes_all_outputs(finished):
    summary = json.loads((finished / "summary.json").read_text())
    expected = {"policy": "mixed_float16", "seed": 0, "train_utterances": 8, "test_utterances": 4}
    assert {name: summary[name] for name in expected} == expected
    assert summary["utterances_per_second"] > 0
    assert summary["loss_scale"] * 2 ** summary["skipped_steps"] == 2.0**15
    lines = lines_of(finished)
    assert [line["step"] for line in lines] == [2, 4]
    assert {name: lines[-1][name] for name in ("wer", "cer")} == {name: summary[name] for name in ("wer", "cer")}
    assert np.isfinite([line[name] for line in lines for name in ("train_loss", "test_loss", "wer", "cer")]).all()
    transcripts = json.loads((finished / "transcripts.json").read_text())["transcripts"]
    references, hypotheses = ([line[name] for line in transcripts] for name in ("reference", "hypothesis"))
    assert jiwer.wer(references, hypotheses) == pytest.approx(summary["wer"])
    assert jiwer.cer(references, hypotheses) == pytest.approx(summary["cer"])
    assert summary["train_not_finite"] == 0


@pytest.fixture(scope="module")
def interrupted(data_flags, tmp_path_factory):
    """A run stopped in the middle of its first epoch, and its flags."""
    output = tmp_path_factory.mktemp("runs") / "parts"
    flags = [*TINY, *data_flags, "--output", str(output)]
    with pytest.MonkeyPatch.context() as patch:
        processes.interrupt_at(patch, 1)
        assert main(flags) == 128 + signal.SIGTERM
    return output, flags


@pytest.mark.slow
def test_interrupted_and_resumed_run_ends_bitwise_equal(finished, interrupted, data, tmp_path, capsys):
    output, flags = interrupted
    shutil.copytree(output, tmp_path / "run")
    flags = [*flags[:-1], str(tmp_path / "run")]
    assert main([*flags, "--resume"]) == 0
    assert checkpoint_of(tmp_path / "run", data) == checkpoint_of(finished, data)
    assert main([*flags, "--resume"]) == 0
    assert "already finished" in capsys.readouterr().out
    assert "--hidden 8, but this command has 9" in error_of([*flags, "--hidden", "9", "--resume"], capsys)


# The program that another process runs for `python -m examples.speech`.
PROGRAM = """
import sys, pytest
from tests.examples import quick
from examples.speech.__main__ import main
from examples.speech.dataset import ENGLISH
quick.make_quick(pytest.MonkeyPatch())
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(processes.KILLS < 2, reason="the same checkpoints as in the image script: MPJAX_KILLS=100")
@pytest.mark.parametrize("number", range(processes.KILLS))
def test_killed_run_resumes_from_its_last_checkpoint(number, finished, data, data_flags, tmp_path):
    output = tmp_path / "run"
    flags = [*TINY, *data_flags]
    processes.start_and_kill(PROGRAM, flags, output, number)
    assert main([*flags, "--output", str(output), *(["--resume"] if output.exists() else [])]) == 0
    assert [line["step"] for line in lines_of(output)] == [2, 4]
    assert checkpoint_of(output, data) == checkpoint_of(finished, data)


@pytest.mark.slow
def test_resume_may_change_the_precision_but_not_the_data(interrupted, data, tmp_path, capsys):
    output = shutil.copytree(interrupted[0], tmp_path / "run")
    shutil.copytree(data["train_data"].parent, tmp_path / "data")
    moved = {name: tmp_path / "data" / path.name for name, path in data.items()}
    flags = [*TINY, "--output", str(output), "--resume", "--policy", "float32"]
    sound = tmp_path / "data" / "train3.wav"
    before = sound.read_bytes()
    samples, rate = soundfile.read(sound)
    soundfile.write(sound, samples * 0.5, rate)
    assert "the train speech differ (8 utterances with digest" in error_of([*flags, *as_flags(**moved)], capsys)
    settings = json.loads((output / "config.json").read_text())
    assert settings["train_data"] == str(data["train_data"])  # A refused command changes nothing.
    sound.write_bytes(before)
    alphabet = tmp_path / "alphabet.txt"
    alphabet.write_text("\n".join(["b", "a", *ENGLISH[3:], " "]) + "\n")
    error = error_of([*flags, *as_flags(**moved), "--alphabet", str(alphabet)], capsys)
    assert "the characters differ (number 1 is ' ' in the run, 'b' here)" in error
    # The same data at another path are the same.
    assert main([*flags, *as_flags(**moved)]) == 0
    assert "from policy mixed_float16 to float32" in capsys.readouterr().out
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["policy"], summary["loss_scale"]) == ("float32", 1)


def test_trained_model_has_a_similar_test_result_in_float32(finished, capsys):
    assert main(["--mode", "evaluate", "--output", str(finished), "--policy", "float32", "--devices", "1"]) == 0
    summary = json.loads((finished / "summary.json").read_text())
    out = capsys.readouterr().out.splitlines()[-1]
    assert out.startswith("WER ")
    assert out.endswith("policy float32")
    # A model trained for four steps writes few characters; allow a difference of one.
    assert abs(float(out.split("CER ")[1].split("%")[0]) / 100 - summary["cer"]) < 0.5


def test_each_program_is_compiled_once_for_each_length(data_flags, tmp_path, caplog):
    flags = [*data_flags, *TINY, "--buckets", "2", "--no-keep-best"]
    with compiled_steps(caplog) as compiled:
        assert main([*flags, "--output", str(tmp_path / "run")]) == 0
    assert compiled == {"train_step": 2, "test_step": 1}  # the test speech has one length


def test_broken_utterance_is_counted_and_the_step_is_kept(finished, data):
    task = task_of(data, mode="train")
    batch = next(task.batches(0, 0))
    batch = batch._replace(audio=batch.audio.at[1].set(np.nan))
    before = task.initial_state()
    params = [np.asarray(x) for x in jax.tree.leaves(before.params)]
    scale = jax.device_put(np.float32(1), before.opt_state.loss_scale.sharding)  # which the program is compiled for
    state, shown = task.training.train_step(
        before._replace(opt_state=before.opt_state._replace(loss_scale=scale)), batch
    )
    assert int(shown["skipped_steps"]) == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert (float(state.totals["count"]), float(state.totals["not_finite"])) == (3, 1)
    assert all(np.array_equal(a, b) for a, b in zip(params, jax.tree.leaves(state.params), strict=True))  # warm-up


BENCHMARK = [*TINY_MODEL, *"--longest 0.2 --num-iter 2 --batch-size 8".split()]
BENCHMARK += ["--mode", "inference_benchmark"]


def test_benchmark_reports_latencies_and_audio_hours(tmp_path, capsys):
    assert main([*BENCHMARK, "--output", str(tmp_path / "one")]) == 0
    results = json.loads((tmp_path / "one" / "benchmark.json").read_text())
    assert results["latency_milliseconds"]["p99"] >= results["latency_milliseconds"]["p50"] > 0
    # Audio of 0.05 s to 0.2 s, with a mean of 0.125 s.
    assert results["audio_hours_per_hour"] == pytest.approx(0.125 * results["utterances_per_second"], rel=1e-3)
    assert "hours of audio/h" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "quoted"),
    [
        (["--batch-size", "12"], "--batch-size 12 is larger than the data"),
        (["--dropout", "1"], "--dropout 1.0"),
        (["--infer", "x.wav"], "--infer needs a trained model"),
        (["--mode", "training_benchmark", "--longest", "0.01"], "--longest 0.01"),
        (["--hiden", "3"], "did you mean --hidden?"),
        (["--alphabet", "no.txt"], "'no.txt' cannot be read"),
        (["--audio-field", "flac"], "--audio-field and --text-field are for shards"),
    ],
)
def test_bad_flags_end_in_one_line(flags, quoted, data_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert quoted in error_of([*data_flags, *flags], capsys)
    assert not Path("runs").exists()


def test_data_flags_come_in_pairs(data_flags, capsys):
    assert "--train-data comes with --test-data" in error_of(data_flags[:1], capsys)
    assert "'no/such/run' holds no run" in error_of(["--mode", "evaluate", "--output", "no/such/run"], capsys)
