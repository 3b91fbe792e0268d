"""Checkpoints of the image example: runs resume after any end and in any precision, and weights can be exported."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.flax import load_file, save_file

from examples.common import modes, weights
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.loop import ENDING, Interruption
from examples.common.run_folder import RunFolder
from examples.common.training import Variables, change_precision, float32_params
from examples.common.weights import cast_weights, read_about
from examples.imagenet import train
from examples.imagenet.train import main
from tests.examples import processes
from tests.examples.imagenet.runs import (
    PROGRAM,
    as_bytes,
    digit_flags,
    digits_task,
    error_of,
    last_state,
    metrics_of,
)

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture(scope="module")
def trained(quick_runs, tmp_path_factory):
    """The folder of a finished run."""
    output = tmp_path_factory.mktemp("trained") / "run"
    assert main(digit_flags(output)) == 0
    return output


@pytest.mark.parametrize("number", ENDING)
def test_each_signal_to_end_stops_the_loop_at_the_next_step(number):
    before = signal.signal(number, signal.SIG_DFL)  # The tests themselves may run under nohup.
    try:
        with Interruption() as interruption:
            signal.raise_signal(number)
            assert interruption.signal == number
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGHUP)
            assert interruption.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_interrupted_and_resumed_run_ends_bitwise_equal(trained, tmp_path, capsys):
    parts = tmp_path / "parts"
    with pytest.MonkeyPatch.context() as patch:
        processes.interrupt_at(patch, 1)  # in the middle of the first epoch
        assert main(digit_flags(parts)) == 128 + signal.SIGTERM
    assert not (parts / "summary.json").exists()
    flags = digit_flags(parts, "--resume")
    said = capsys.readouterr().out
    assert "stopped by SIGTERM after step 1" in said
    assert f"python -m examples.imagenet {' '.join(flags)}\n" in said
    assert main(flags) == 0
    assert as_bytes(last_state(trained)) == as_bytes(last_state(parts))
    assert metrics_of(trained) == metrics_of(parts)


@pytest.fixture(scope="module")
def sharded(quick_runs, tmp_path_factory):
    """The folder of a finished run whose state is split over two devices."""
    output = tmp_path_factory.mktemp("sharded") / "run"
    assert main([*digit_flags(output), *SHARDED]) == 0
    return output


SHARDED = ("--devices", "2", "--fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(processes.KILLS))
def test_killed_run_resumes_from_its_last_checkpoint(number, request, tmp_path, capsys):
    """Every other run is sharded over two devices."""
    output, whole = tmp_path / "run", request.getfixturevalue("sharded" if number % 2 else "trained")
    flags = [*digit_flags(output), *(SHARDED if number % 2 else ())]
    processes.start_and_kill(PROGRAM, flags, output, number)
    # Every file is complete, whenever the process was killed.
    if number == 0 or (output / "config.json").exists():
        assert json.loads((output / "config.json").read_text())["epochs"] == 2
    if (output / "metrics.jsonl").exists():
        metrics_of(output)
    if saved := processes.newest(output):
        assert int(last_state(output).step) == saved
    exists = output.exists()
    assert main([*flags, *(["--resume"] if exists else [])]) == 0
    assert [line["step"] for line in metrics_of(output)] == [3, 6]
    assert ("starts from the beginning" in capsys.readouterr().out) == (exists and not saved)
    # A checkpoint of the last step may be from before the end of its epoch, which resets the sums.
    found, expected = (last_state(path)._replace(totals=()) for path in (output, whole))
    assert as_bytes(found) == as_bytes(expected)


def test_run_killed_before_its_first_checkpoint_starts_from_the_beginning(tmp_path):
    (tmp_path / "config.json.part").write_text("{")
    with (
        RunFolder.reopen(tmp_path, {"seed": 0, "script": "imagenet"}) as folder,
        Checkpoints(folder.checkpoints) as checkpoints,
    ):
        assert digits_task().restore(checkpoints) is None


@pytest.mark.slow
def test_run_resumes_in_another_precision(tmp_path, capsys):
    output = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        processes.interrupt_at(patch, 3)  # in the evaluation of the first epoch
        assert main(digit_flags(output)) == 128 + signal.SIGTERM
    capsys.readouterr()
    assert main(digit_flags(output, "--policy", "mixed_bfloat16", "--amp", "autocast", "--resume")) == 0
    said = capsys.readouterr().out
    assert "from policy mixed_float16 to mixed_bfloat16" in said
    assert "the loss scale starts at 1," in said
    assert [line["policy"] for line in metrics_of(output)] == ["mixed_bfloat16"] * 2
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["policy"], summary["loss_scale"]) == ("mixed_bfloat16", 1.0)
    # All other flags must stay the same.
    assert "--seed 0, but this command has 1" in error_of(digit_flags(output, "--resume", "--seed", "1"), capsys)


@pytest.mark.parametrize("chain", [("O2", "float32", "O2"), ("mixed_float16", "O3", "mixed_float16")])
def test_change_of_precision_keeps_parameters_and_momentum(chain):
    made = {policy: digits_task(policy=policy) for policy in set(chain)}
    tasks = [made[policy] for policy in chain]
    fresh = [task.initial_state() for task in tasks]
    rng = np.random.default_rng(0)
    # Values that half precision represents exactly, so that O3 can hold them too.
    start = jax.tree.map(lambda x: jnp.asarray(rng.integers(1, 100, x.shape) / 64, x.dtype), fresh[0])
    state = start
    for task, new in zip(tasks[1:], fresh[1:], strict=True):
        state = change_precision(state, new, task.training.policy)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), new)
        assert as_bytes(float32_params(state)) == as_bytes(float32_params(start))
        assert as_bytes(optax.tree.get(state, "trace")) == as_bytes(optax.tree.get(start, "trace"))
        assert state.opt_state.loss_scale == new.opt_state.loss_scale
        assert state.opt_state.skipped_steps == start.opt_state.skipped_steps


# Inference.


def test_export_in_half_has_a_similar_test_result(trained, capsys):
    dtype = "bfloat16"
    flags = ["--devices", "1", "--mode", "evaluate"]
    assert main([*flags, "--output", str(trained), "--export", dtype, "--policy", "float32"]) == 0
    said = capsys.readouterr().out
    file = str(trained / f"weights_{dtype}.safetensors")
    with safe_open(file, "flax") as arrays:
        dtypes = {name: arrays.get_tensor(name).dtype.name for name in arrays.keys()}  # noqa: SIM118
    assert {dtypes[name] for name in dtypes if name.startswith("params/")} == {dtype}
    assert {dtypes[name] for name in dtypes if name.startswith("stats/")} == {"float32"}
    assert read_about(trained / f"weights_{dtype}.safetensors")["data"]["classes"] == list("0123456789")
    accuracy = metrics_of(trained)[-1]["test_accuracy"]
    assert f"test accuracy {accuracy:.2%}, policy float32" in said
    assert main([*flags, "--weights", file, "--policy", f"p={dtype},c={dtype},o=f32"]) == 0
    exported = float(capsys.readouterr().out.split("test accuracy ")[1].split("%")[0]) / 100
    assert exported == pytest.approx(accuracy, abs=2 / 96)


@pytest.mark.parametrize("factor", [2.0**14, np.nan])
def test_images_without_finite_outputs_count_as_wrong(trained, tmp_path, capsys, factor):
    assert main(["--devices", "1", "--mode", "evaluate", "--output", str(trained), "--export", "float32"]) == 0
    written, damaged = trained / "weights_float32.safetensors", tmp_path / "damaged.safetensors"
    arrays, about = load_file(written), read_about(written)
    # A convolution of some images overflows float16. NaN goes into the last layer: in XLA's code for CPUs, a relu of
    # NaN may be 0, in float32 too.
    kernel = "params/Dense_0/kernel" if np.isnan(factor) else "params/BasicBlock_0/Conv_1/kernel"
    arrays[kernel] = arrays[kernel] * factor
    save_file(arrays, damaged, {weights._ABOUT: json.dumps(about)})
    flags = ["--weights", str(damaged), "--devices", "1", "--policy", "mixed_float16"]
    if np.isnan(factor):
        assert "all 96 test images gave inf or NaN" in error_of(["--mode", "evaluate", *flags], capsys)
        return
    assert main(["--mode", "evaluate", *flags]) == 1
    said = capsys.readouterr().out
    assert main(["--mode", "predict", "--output", str(tmp_path), *flags]) == 1
    predictions = json.loads((tmp_path / "predictions.json").read_text())["predictions"]
    nonfinite = sum(line["class"] is None for line in predictions)
    assert 0 < nonfinite < 96
    assert f"{nonfinite} of 96 test images gave inf or NaN; they count as wrong" in said
    accuracy = np.mean([line["class"] == line["truth"] for line in predictions])
    assert f"test accuracy {accuracy:.2%}" in said


def test_export_that_loses_accuracy_is_removed(trained, monkeypatch, capsys):
    real = modes.cast_weights
    monkeypatch.setattr(modes, "cast_weights", lambda v, d: jax.tree.map(jnp.zeros_like, real(v, d)))
    error = error_of(["--mode", "evaluate", "--devices", "1", "--output", str(trained), "--export", "float32"], capsys)
    assert "--export float32: test accuracy" in error
    assert not (trained / "weights_float32.safetensors").exists()


def test_weights_out_of_range_are_named():
    variables = Variables({"head": {"kernel": jnp.full((2, 2), 1e5)}}, {})
    with pytest.raises(UsageError, match="head/kernel is out of range; use bfloat16"):
        cast_weights(variables, "float16")


def test_predictions_for_files_equal_those_for_test_images(trained, tmp_path, capsys):
    from sklearn.metrics import classification_report  # takes seconds to import

    flags = ["--mode", "predict", "--output", str(trained), "--devices", "1"]
    assert main(flags) == 0
    written = json.loads((trained / "predictions.json").read_text())
    of_test_set = written["predictions"]
    report = classification_report(
        [line["truth"] for line in of_test_set],
        [line["class"] for line in of_test_set],
        output_dict=True,
        zero_division=0,
    )
    for name, found in written["classes"].items():
        assert (found["images"], found["accuracy"]) == (report[name]["support"], report[name]["recall"])
    assert len(of_test_set) == 96
    for name in ("curves", "confusion"):
        with Image.open(trained / f"{name}.png") as picture:
            assert len(picture.convert("RGB").getcolors(2**20)) > 20  # something is drawn
    assert report["accuracy"] == pytest.approx(metrics_of(trained)[-1]["test_accuracy"])
    digits = digits_task().test_set.load(np.arange(2), None).images
    paths = [tmp_path / f"{index}.png" for index in range(2)]
    for path, pixels in zip(paths, digits, strict=True):
        Image.fromarray(pixels[:, :, 0]).save(path)
    assert main([*flags, "--images", *map(str, paths)]) == 0
    of_files = json.loads((trained / "predictions.json").read_text())["predictions"]
    for one, two in zip(of_files, of_test_set, strict=False):
        assert one["class"] == two["class"]
        assert one["probability"] == pytest.approx(two["probability"], rel=1e-2)
    (tmp_path / "no.png").write_bytes(b"no image")
    assert "no.png': not a complete JPEG" in error_of([*flags, "--images", str(tmp_path / "no.png")], capsys)
    # The good files are finished, and the exit code says that one is bad.
    assert main([*flags, "--images", str(tmp_path / "no.png"), str(paths[0])]) == 1
    captured = capsys.readouterr()
    assert "no.png': not a complete JPEG" in captured.err
    assert f"{paths[0]}: {of_files[0]['class']} (" in captured.out


def test_the_plain_script_of_the_documentation_uses_an_export(trained, tmp_path, monkeypatch, capsys):
    flags = ["--devices", "1", "--output", str(trained)]
    assert main([*flags, "--mode", "evaluate", "--export", "float32"]) == 0
    image = tmp_path / "digit.png"
    Image.fromarray(digits_task().test_set.load(np.arange(1), None).images[0, :, :, 0]).save(image)
    assert main([*flags, "--mode", "predict", "--policy", "float32", "--images", str(image)]) == 0
    (known,) = json.loads((trained / "predictions.json").read_text())["predictions"]
    page = (Path(train.__file__).parents[2] / "docs" / "training_scripts.md").read_text()
    (code,) = re.findall(r"## Use an export.*?```python\n(.*?)```", page, re.DOTALL)
    assert len(code.splitlines()) <= 20
    monkeypatch.setattr("sys.argv", ["use.py", str(trained / "weights_float32.safetensors"), str(image)])
    capsys.readouterr()
    exec(compile(code, "training_scripts.md", "exec"), {})
    assert capsys.readouterr().out == f"{image} {known['class']}\n"
