"""Features that the speech script shares with the image script: export, parity, a dev set."""

from __future__ import annotations

import numpy as np
import pytest

from examples.common.parity import Maker
from examples.common.run_folder import RunFolder
from examples.speech.__main__ import main
from examples.speech.train import SpeechTask
from tests.examples.speech.runs import TINY, TINY_MODEL, error_of, lines_of

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.mark.slow
def test_dev_set_export_average_and_files(data, data_flags, tmp_path, capsys):
    """With the default optimizer and augmentation, too."""
    output = tmp_path / "run"
    flags = [*TINY_MODEL, "--batch-size=4", "--buckets=1", "--epochs=1", "--ema=0.9", "--loss-scale=0.25"]
    flags += [*data_flags, f"--dev-data={data['test_data']}", "--output", str(output)]
    assert main([*flags, "--export", "bfloat16"]) == 0
    (line,) = lines_of(output)
    summary = RunFolder(output).summary
    assert "wer" not in line
    assert {"dev_wer", "dev_cer"} <= set(line)
    assert {"wer", "dev_wer", "export_dev_wer"} <= set(summary)
    assert summary["loss_scale"] == 0.25
    assert (output / "best").is_dir()
    capsys.readouterr()
    # Transcribed by an export, in another precision than in training.
    flags = ["--weights", str(output / "weights_bfloat16.safetensors"), "--policy", "mixed_bfloat16"]
    assert main([*flags, "--mode", "evaluate", "--output", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "transcripts.json").exists()
    capsys.readouterr()
    audio = [str(data["test_data"].with_name(f"test{index}.wav")) for index in range(3)]
    assert main([*flags, "--infer", *audio]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines[:3]] == audio
    assert last.startswith("policy mixed_bfloat16, latency ")
    assert "real-time factor" in last
    assert "cannot be opened" in error_of([*flags, "--infer", "no.wav"], capsys)


def test_speech_script_runs_under_parity(data_flags):
    """As in tests/examples/common/test_parity.py."""
    training = Maker(SpeechTask, [*TINY, *data_flags])("mixed_float16", 0)
    first = next(iter(training.batches()))
    state, loss = training.step(training.state, first)
    assert np.isfinite(loss)
    assert training.metric(state) >= 0
    assert (training.metric_name, training.larger_is_better) == ("WER", False)
