"""Flags select exactly one action of each script."""

from __future__ import annotations

from typing import Any

import pytest

from examples.common import modes
from examples.common.modes import final_line
from examples.custom.__main__ import CustomTask
from examples.imagenet.train import ImageTask
from examples.speech.train import SpeechTask


@pytest.mark.parametrize("script", [CustomTask, ImageTask, SpeechTask])
@pytest.mark.parametrize(
    ("flags", "done"),
    [
        ({}, "run_training"),
        ({"audit": True}, "inspect"),
        ({"mode": "training_benchmark"}, "run_benchmark"),
        ({"mode": "evaluate", "output": "run"}, "evaluate"),
    ],
)
def test_flags_choose_one_mode(script, flags, done, monkeypatch):
    if script is CustomTask and "mode" in flags:
        pytest.skip("this script only trains")
    called = []

    def note(name: str) -> Any:
        return lambda *_, **__: called.append(name) or {}

    for name in ("run_training", "inspect", "run_benchmark", "evaluate"):
        monkeypatch.setattr(modes, name, note(name))
    monkeypatch.setattr(script, "open", note("data"))
    modes.run(script.config_type(**flags), script)
    assert called == ([done] if done == "evaluate" else ["data", done])


def test_final_line_shows_the_metrics_of_the_summary():
    images = {"policy": "O2", "train_accuracy": 0.5, "loss_scale": 4.0}
    assert final_line(images, ImageTask) == "train accuracy 50.00%, policy O2, loss scale 4"
    assert final_line(images | {"test_accuracy": 0.25}, ImageTask) == "test accuracy 25.00%, policy O2, loss scale 4"
    assert final_line({"policy": "O2", "predictions": []}, ImageTask) == ""
    speech = {"policy": "O2", "latency_milliseconds": {"avg": 1.0}, "utterances_per_second": 1234.5}
    assert final_line(speech, SpeechTask) == "policy O2, 1,234 utterances/s"
    assert final_line({"latency_milliseconds": 1.25, "policy": "O1"}, SpeechTask) == "policy O1, latency 1.2 ms"
