"""Each script does what its flags say, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from examples.common import modes
from examples.custom.__main__ import Config as CustomConfig
from examples.imagenet.config import Config as ImageConfig
from examples.speech.config import Config as SpeechConfig


@pytest.mark.parametrize("script", [CustomConfig, ImageConfig, SpeechConfig])
@pytest.mark.parametrize(
    ("flags", "done"),
    [
        ({}, "run_training"),
        ({"audit": True}, "inspect"),
        ({"find_batch_size": True}, "find_batch_sizes"),
        ({"compare": "float32,O2"}, "train_and_compare"),
        ({"mode": "training_benchmark"}, "run_benchmark"),
        ({"mode": "inference_benchmark", "find_batch_size": True}, "find_batch_sizes"),
        ({"mode": "evaluate", "output": "run"}, "evaluate"),
    ],
)
def test_flags_choose_one_mode(script, flags, done, monkeypatch):
    if script is CustomConfig and "mode" in flags:
        pytest.skip("this script only trains")
    called = []

    def note(name: str) -> Any:
        return lambda *_, **__: called.append(name) or {}

    for name in ("run_training", "inspect", "find_batch_sizes", "train_and_compare", "run_benchmark", "run_comparison"):
        monkeypatch.setattr(modes, name, note(name))
    modes.run(script(**flags), note("data"), {"evaluate": note("evaluate")})
    assert called == ([done] if done == "evaluate" else ["data", done])
