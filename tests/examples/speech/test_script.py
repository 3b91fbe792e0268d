"""The speech training example: its outputs, a resumed run, other precisions, and bad flags."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from examples.common import loop
from examples.common.devices import DataParallel
from examples.speech import seeds
from examples.speech.__main__ import main
from examples.speech.config import Config
from examples.speech.precision import losses_by_part, table
from examples.speech.task import SpeechTask, open_alphabet, open_data

pytestmark = pytest.mark.usefixtures("stored_programs")
# A model that compiles in half the time of the default one: a clipped ReLU in the place of a bidirectional GRU.
SMALL = {"hidden": 8, "context": 1, "stride": 2, "cell": "rnn", "bidirectional": False, "layer_norm": False}
SMALL |= {"batch_size": 4, "buckets": 1, "epochs": 2, "augment": False}
TINY_MODEL = "--hidden 8 --context 1 --stride 2 --cell rnn --no-bidirectional --no-layer-norm --devices 1".split()
TINY = [*TINY_MODEL, *"--batch-size 4 --buckets 1 --epochs 2 --no-augment".split()]


@pytest.fixture(scope="module")
def data_flags(data):
    return [part for name, path in data.items() for part in (f"--{name.replace('_', '-')}", str(path))]


@pytest.fixture(scope="module")
def finished(data_flags, tmp_path_factory):
    """The folder of a finished run in mixed_float16."""
    output = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*TINY, *data_flags, "--output", str(output)]) == 0
    return output


def lines_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def checkpoint_of(output: Path, data_flags: list[str]) -> list[bytes]:
    """Every array of the newest checkpoint, as bytes that a comparison cannot round."""
    config = Config(**small(data_flags))
    task = SpeechTask(config, DataParallel(1), open_alphabet(config), **open_data(config))
    with loop.Checkpoints(output / "checkpoints") as checkpoints:
        state, _ = task.restore_as_saved(checkpoints)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def small(data_flags: list[str]) -> dict:
    """`TINY` and the data as arguments of `Config`."""
    return {**SMALL, "train_data": Path(data_flags[1]), "test_data": Path(data_flags[3])}


def error_of(arguments, capsys):
    """The one line that a mistake ends in, with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    assert len(lines) == 1
    return lines[0]


def test_run_leaves_all_its_outputs(finished):
    summary = json.loads((finished / "summary.json").read_text())
    expected = {"policy": "mixed_float16", "seed": 0, "train_utterances": 8, "test_utterances": 4}
    assert {name: summary[name] for name in expected} == expected
    assert summary["utterances_per_second"] > 0
    assert summary["loss_scale"] * 2 ** summary["skipped_steps"] == 2.0**15
    lines = lines_of(finished)
    assert [line["step"] for line in lines] == [2, 4]
    assert {name: lines[-1][name] for name in ("wer", "cer")} == {name: summary[name] for name in ("wer", "cer")}
    assert np.isfinite([line[name] for line in lines for name in ("train_loss", "test_loss", "wer", "cer")]).all()
    assert (finished / "curves.png").stat().st_size > 10_000
    assert "worst:" in (finished / "transcripts.txt").read_text()
    assert not (finished / "not_finite.txt").exists()


@pytest.mark.slow
def test_interrupted_and_resumed_run_ends_bitwise_equal(finished, data_flags, tmp_path, monkeypatch, capsys):
    flags = [*TINY, *data_flags, "--output", str(tmp_path / "parts")]
    steps = iter(range(100))
    real = loop._Run._save_or_stop

    def look(self):
        if next(steps) == 1:  # in the middle of the first epoch
            signal.raise_signal(signal.SIGTERM)
        real(self)

    monkeypatch.setattr(loop._Run, "_save_or_stop", look)
    assert main(flags) == 128 + signal.SIGTERM
    assert f"python -m examples.speech {' '.join(flags)} --resume\n" in capsys.readouterr().out
    assert main([*flags, "--resume"]) == 0
    assert checkpoint_of(tmp_path / "parts", data_flags) == checkpoint_of(finished, data_flags)
    assert main([*flags, "--resume"]) == 0
    assert "already finished" in capsys.readouterr().out
    assert "--hidden 8, this command has 9" in error_of([*flags, "--hidden", "9", "--resume"], capsys)


def test_text_of_a_file_comes_in_another_precision_than_the_training(finished, data_flags, capsys):
    audio = Path(data_flags[3]).with_name("test0.wav")
    flags = ["--output", str(finished), "--policy", "mixed_bfloat16", "--decoder", "beam", "--beam", "2"]
    assert main([*flags, "--infer", str(audio)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("policy mixed_bfloat16, latency ")
    assert "real-time factor" in last
    assert "cannot be opened" in error_of([*flags, "--infer", "no.wav"], capsys)


def test_a_trained_model_tests_alike_in_float32(finished, capsys):
    assert main(["--mode", "evaluate", "--output", str(finished), "--policy", "float32"]) == 0
    summary = json.loads((finished / "summary.json").read_text())
    out = capsys.readouterr().out.splitlines()[-1]
    assert out.startswith("WER ")
    assert out.endswith("policy float32")
    # A character more or less of the few that a model of four steps writes.
    assert abs(float(out.split("CER ")[1].split("%")[0]) / 100 - summary["cer"]) < 0.5


def test_one_broken_utterance_costs_no_step_and_is_counted(finished, data_flags):
    config = Config(**small(data_flags))
    task = SpeechTask(config, DataParallel(1), open_alphabet(config), **open_data(config))
    task.compile()
    batch = next(task.batches(0, 0))
    batch.audio[1] = np.nan
    before = task.initial_state()
    params = [np.asarray(x) for x in jax.tree.leaves(before.params)]
    state, shown = task.train_step(
        before._replace(opt_state=before.opt_state._replace(loss_scale=np.float32(1))), batch
    )
    assert int(shown["skipped_steps"]) == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert np.flatnonzero(state.extra).tolist() == [batch.indices[1]]
    assert float(state.totals["count"]) == 3
    assert all(np.array_equal(a, b) for a, b in zip(params, jax.tree.leaves(state.params), strict=True))  # warm-up


BENCHMARK = [*TINY_MODEL, *"--longest 0.2 --num-iter 2 --batch-size 2".split()]


@pytest.mark.slow
def test_policies_are_measured_side_by_side(tmp_path):
    flags = [*BENCHMARK, "--mode", "inference_benchmark", "--compare", "float32,mixed_float16"]
    assert main([*flags, "--output", str(tmp_path / "both")]) == 0
    rows = json.loads((tmp_path / "both" / "comparison.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["float32", "mixed_float16"]
    # Audio of 0.05 s and 0.2 s, so many times in a second.
    assert all(row["audio_hours_per_hour"] == pytest.approx(0.125 * row["items_per_second"], rel=1e-3) for row in rows)


def test_benchmark_says_latencies_and_audio_hours(tmp_path, capsys):
    assert main([*BENCHMARK, "--mode", "inference_benchmark", "--output", str(tmp_path / "one")]) == 0
    results = json.loads((tmp_path / "one" / "benchmark.json").read_text())
    assert results["latency_milliseconds"]["p99"] >= results["latency_milliseconds"]["p50"] > 0
    assert "hours of audio/h" in capsys.readouterr().out


def test_seeds_makes_a_table_of_error_rates(tmp_path, monkeypatch, capsys):
    def run(config):
        rate = {"float32": 0.02, "O1": 0.03}[config.policy] + config.seed / 100
        return {"policy": config.policy, "wer": rate, "cer": rate / 2, "skipped_steps": config.seed}

    monkeypatch.setattr(seeds, "run", run)
    flags = ["--policies", "float32", "O1", "--amps", "module", "autocast", "--seeds", "0", "1"]
    (tmp_path / "table").mkdir()
    assert seeds.main([*flags, "--output", str(tmp_path / "table")]) == 0
    rows = (tmp_path / "table" / "results.md").read_text().splitlines()
    assert [row.split(" | ")[:2] for row in rows[2:]] == [
        ["| float32", "module"],
        ["| O1", "module"],
        ["| O1", "autocast"],
    ]
    assert "2.50% ± 0.71% | 2.00% | 3.00% | 1.25% ± 0.35% | 1.00% | 1.50% | 1 |" in rows[2]


def test_precision_table_has_the_worst_operation_of_each_part():
    row = {"phase": "forward", "overflowed": 0.0, "flushed": 0.0, "absorbed": 0.0, "max": 2.0}
    by_op = [
        SimpleNamespace(**row | {"op": "log", "source": "features.py:9", "flushed": 0.25}),
        SimpleNamespace(**row | {"op": "square", "source": "features.py:8", "flushed": 0.5}),
        SimpleNamespace(**row | {"op": "mul", "source": "_classification.py:7", "overflowed": 1.0, "max": 1e5}),
        SimpleNamespace(**row | {"op": "tanh", "source": "recurrence.py:1"}),
    ]
    lines = table(losses_by_part(SimpleNamespace(by_op=by_op))).splitlines()[2:]
    assert [line.split(" | ")[1:] for line in lines] == [
        ["square", "forward", "flushed", "50.0%", "2 |"],
        ["mul", "forward", "overflowed", "100.0%", "1e+05 |"],
    ]


@pytest.mark.parametrize(
    ("flags", "quoted"),
    [
        (["--policy", "mixed_float17"], "'mixed_float17'"),
        (["--policy", "O2", "--amp", "autocast"], "--amp autocast keeps the parameters in float32"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--batch-size", "9"], "--batch-size 9 is larger than the data"),
        (["--learning-rate", "nan"], "--learning-rate nan"),
        (["--dropout", "1"], "--dropout 1.0"),
        (["--mels", "20"], "--mels 20"),
        (["--lookahead", "3"], "--lookahead 3"),
        (["--resume"], "--output DIR"),
        (["--infer", "x.wav"], "--infer needs a trained model"),
        (["--compare", "float32,x"], "--compare 'x'"),
        (["--compare", "float32", "--batch-sizes", "4,"], "--batch-sizes '4,'"),
        (["--mode", "evaluate", "--output", "no/such/run"], "--train-data has no effect in --mode evaluate"),
        (["--mode", "training_benchmark", "--longest", "0.01"], "--longest 0.01"),
        (["--hiden", "3"], "did you mean --hidden?"),
        (
            ["--weights", "x"],
            "--weights has no effect in --mode train_and_evaluate; it is for evaluate, predict",
        ),
        (["--alphabet", "no.txt"], "'no.txt' cannot be read"),
        (["--batch-size", "4", "--output", "taken"], "'taken' is a file"),
    ],
)
def test_bad_flags_end_in_one_line(flags, quoted, data_flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    assert quoted in error_of([*data_flags, *flags], capsys)
    assert not Path("runs").exists()


def test_data_flags_come_in_pairs(data_flags, capsys):
    assert "--train-data comes with --test-data" in error_of(data_flags[:2], capsys)
    assert "'no/such/run' holds no run" in error_of(["--mode", "evaluate", "--output", "no/such/run"], capsys)
