"""Flags select exactly one action of each script."""

from __future__ import annotations

import typing
from typing import Any

import pytest

from examples.common import flags, modes
from examples.common.cli import UsageError
from examples.common.modes import final_line
from examples.custom.__main__ import CustomTask
from examples.imagenet.train import ImageTask
from examples.speech.train import SpeechTask


@pytest.mark.parametrize("script", [CustomTask, ImageTask, SpeechTask])
@pytest.mark.parametrize(
    ("given", "done"),
    [
        ({}, "run_training"),
        ({"audit": True}, "inspect"),
        ({"mode": "training_benchmark"}, "run_benchmark"),
        ({"mode": "evaluate", "output": "run"}, "evaluate"),
    ],
)
def test_flags_choose_one_mode(script, given, done, monkeypatch):
    if script is CustomTask and "mode" in given:
        pytest.skip("this script only trains")
    called = []

    def note(name: str) -> Any:
        return lambda *_, **__: called.append(name) or {}

    for name in ("run_training", "inspect", "run_benchmark", "evaluate"):
        monkeypatch.setattr(modes, name, note(name))
    monkeypatch.setattr(script, "open", note("data"))
    modes.run(script.config_type(**given), script)
    assert called == ([done] if done == "evaluate" else ["data", done])


# The flags of each action: train, --audit, training_benchmark, inference_benchmark, evaluate and predict. An inspection
# takes the flags of the training that it inspects.
ACTIONS = {
    "t": "",
    "a": "--audit",
    "b": "--mode training_benchmark",
    "i": "--mode inference_benchmark",
    "e": "--mode evaluate --output run",
    "p": "--mode predict --output run",
}
RECIPE = """loss-scale learning-rate schedule warmup-epochs optimizer momentum nesterov weight-decay clip-norm ema
freeze accumulate"""
TRAINING = "epochs patience save-every keep keep-best log-every"
JOIN = "coordinator num-processes process-id"
USES = {
    CustomTask: {
        "ta": f"audit profile numerics policy amp batch-size devices seed fsdp config {JOIN} {RECIPE} {TRAINING}",
        "t": "output resume init-from export",
    },
    ImageTask: {
        "tabiep": f"audit profile numerics policy amp mode batch-size devices data-dir dataset image-size {JOIN}",
        "tbiep": "output",
        "tab": RECIPE,
        "tabi": "model seed fsdp config",
        "taep": "workers image-field label-field whole test-crop interpolation max-unreadable",
        "ta": f"{TRAINING} augment flip recipe label-smoothing mixup random-erasing",
        "t": "resume init-from",
        "te": "export",
        "bi": "warmup-steps num-iter iter-unit",
        "ep": "weights best",
        "p": "images",
    },
    SpeechTask: {
        "tabiep": f"audit profile numerics policy amp mode {JOIN}",
        "tbiep": "output",
        "tabie": "batch-size devices",
        "tab": f"{RECIPE} dropout",
        "tabi": "seed fsdp config alphabet hidden cell bidirectional stride context layer-norm",
        "tae": "workers test-data audio-field text-field cache-dir max-skipped max-seconds drop-characters buckets",
        "ta": f"{TRAINING} augment train-data dev-data",
        "t": "resume init-from",
        "te": "export",
        "bi": "warmup-steps num-iter longest",
        "ep": "weights best",
        "p": "infer",
    },
}
NUMBERS = {int: "2", float: "0.25"}


def error_of(script, words):
    try:
        flags.parse(script.config_type, "script", words)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("script", USES)
def test_a_flag_without_effect_is_refused(script):
    hints = typing.get_type_hints(script.config_type)
    actions_of = {name: actions for actions, names in USES[script].items() for name in names.split()}
    for field in flags._flags(script.config_type):
        name, default = flags._names(field)[0], field.default
        options = flags._argument_options(hints[field.name], default)
        value = {"--policy": "O1", "--loss-scale": "1"}.get(name) or NUMBERS.get(options.get("type"), "file")
        words = [name, *([] if "action" in options else [options.get("choices", [value])[0]])]
        for letter, mode in ACTIONS.items():
            mode = mode.replace("--mode predict", "--infer file") if script is SpeechTask else mode
            if name not in ("--mode", "--infer") and not (script is CustomTask and letter not in "ta"):
                error = error_of(script, [*mode.split(), *words])
                if letter in actions_of[name[2:]]:
                    assert "has no effect in" not in error, mode
                else:
                    assert name in error, mode


@pytest.mark.parametrize(
    ("script", "words", "quoted"),
    [
        (
            ImageTask,
            "--mode predict --output run --images a --data-dir b",
            "--data-dir b has no effect on --images",
        ),
        (ImageTask, "--mode evaluate --output run --weights a", "--output run has no effect with --weights"),
        (ImageTask, "--mode train --no-keep-best", "--no-keep-best needs tests"),
        (SpeechTask, "--infer a --output run --weights b", "--output run has no effect with --infer and --weights"),
        (SpeechTask, "--train-data a --test-data b --cache-dir c", "--cache-dir c has no effect with --test-data"),
        (SpeechTask, "--mode train --train-data a --test-data b --dev-data c", "--dev-data c needs tests"),
        (CustomTask, "--workers 2", "--workers: unknown flag"),
    ],
)
def test_a_flag_without_effect_beside_others_is_refused(script, words, quoted):
    assert quoted in error_of(script, words.split())


def test_final_line_shows_the_metrics_of_the_summary():
    images = {"policy": "O2", "train_accuracy": 0.5, "loss_scale": 4.0}
    assert final_line(images, ImageTask) == "train accuracy 50.00%, policy O2, loss scale 4"
    assert final_line(images | {"test_accuracy": 0.25}, ImageTask) == "test accuracy 25.00%, policy O2, loss scale 4"
    assert final_line({"policy": "O2", "predictions": []}, ImageTask) == ""
    speech = {"policy": "O2", "latency_milliseconds": {"avg": 1.0}, "utterances_per_second": 1234.5}
    assert final_line(speech, SpeechTask) == "policy O2, 1,234 utterances/s"
    assert final_line({"latency_milliseconds": 1.25, "policy": "O1"}, SpeechTask) == "policy O1, latency 1.2 ms"
