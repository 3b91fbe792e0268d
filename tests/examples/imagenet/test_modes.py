"""The benchmark modes of the image example: what they measure and write."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from examples.common import modes
from examples.common.flags import parse
from examples.common.modes import time_steps
from examples.imagenet.__main__ import main
from examples.imagenet.config import Config

pytestmark = pytest.mark.usefixtures("quick_runs")

TINY = ["--model", "resnet8", "--image-size", "8", "--batch-size", "4", "--devices", "1"]


def test_training_benchmark_writes_its_results(tmp_path, capsys):
    # Flags as in NVIDIA's scripts.
    nvidia = "--mode=training_benchmark --warmup_steps 1 --num_iter 3 --iter_unit batch --data_dir= --batch_size 4"
    tiny = "--use_xla --model resnet8 --image_size 8 --devices 1"
    flags = [*nvidia.split(), *tiny.split(), f"--results_dir={tmp_path}"]
    assert main([*flags, "--use_tf_amp", "--loss-scale", "1e37"]) == 0
    results = json.loads((tmp_path / "benchmark.json").read_text())
    assert set(results["latency_milliseconds"]) == {"avg", "p50", "p90", "p95", "p99"}
    assert results["images_per_second"] == pytest.approx(4e3 / results["latency_milliseconds"]["avg"], rel=1e-3)
    assert results["loss_scale"] == pytest.approx(1e37)
    assert results["skipped_steps"] == 4  # that scale overflows float16, in the warm-up too
    assert results["compile_seconds"] > 0
    assert results["program_bytes"] > 4 * results["parameters"]
    assert results["data"] == "synthetic images"
    assert (results["policy"], results["batch_size"], results["iterations"]) == ("mixed_float16", 4, 3)
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("policy mixed_float16, ")
    assert "--use_tf_amp: means --policy mixed_float16" in out
    assert "--use_xla: ignored: JAX always compiles with XLA" in out
    off = parse(Config, "imagenet", [*flags, "--use_tf_amp=0"])
    assert (off.policy, off.mode) == ("float32", "training_benchmark")


def test_inference_benchmark_waits_for_each_batch(tmp_path):
    flags = ["--mode", "inference_benchmark", "--warmup-steps", "0", "--num-iter", "2", "--amp", "autocast", *TINY]
    assert main([*flags, "--output", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert (results["mode"], results["amp"], results["iterations"]) == ("inference_benchmark", "autocast", 2)
    assert "loss_scale" not in results


@pytest.mark.parametrize(("ahead", "awaited"), [(0, "+0 -0 +1 -1 +2 -2"), (1, "+0 +1 -0 +2 -1 -2")])
def test_a_training_always_has_a_step_queued(ahead, awaited):
    events = []

    class Output:
        def __init__(self):
            self.number = sum(event[0] == "+" for event in events)
            events.append(f"+{self.number}")

        def block_until_ready(self):
            events.append(f"-{self.number}")
            return self

    last, seconds = time_steps(Output, 3, ahead)
    assert (last.number, seconds.shape) == (2, (3,))
    assert " ".join(events) == awaited


def test_measurement_excludes_the_warm_up(tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "time_steps", lambda step, count, ahead: (step(), np.array([9, 9, 1, 1, 4])[:count]))
    flags = ["--mode", "inference_benchmark", "--warmup-steps", "2", "--num-iter", "3", *TINY]
    assert main([*flags, "--output", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert results["latency_milliseconds"]["p50"] == 1000
    assert results["images_per_second"] == 2


@pytest.mark.parametrize(
    ("inspection", "shown"), [("--audit", "ResNet"), ("--profile", "of the step"), ("--numerics", "ResNet")]
)
def test_the_step_of_a_benchmark_can_be_inspected(inspection, shown, capsys):
    assert main(["--mode", "training_benchmark", *TINY, inspection]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.gpu
def test_gpu_reports_its_memory(tmp_path):
    flags = ["--mode", "training_benchmark", "--warmup-steps", "1", "--num-iter", "3", *TINY]
    assert main([*flags, "--output", str(tmp_path / "run")]) == 0
    results = json.loads((tmp_path / "run" / "benchmark.json").read_text())
    assert 0 < results["peak_memory_bytes"] < jax.devices()[0].memory_stats()["bytes_limit"]
