"""The training loop of the scripts: the best epoch, early stopping, checkpoint retention and metric sinks."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import types

import jax
import numpy as np
import pytest
from PIL import Image

from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.devices import DataParallel, peer_lost
from examples.common.modes import run_variables
from examples.common.reporting import Sinks, plot_curves
from examples.common.run_folder import RunFolder
from examples.custom.__main__ import Config, CustomTask, main
from examples.imagenet.task import correct

pytestmark = pytest.mark.usefixtures("stored_programs")

# One step per epoch of 426 training entries. Without a schedule, any number of epochs compiles to the same program.
FLAGS = ["--devices", "1", "--batch-size", "400", "--log-every", "1", "--schedule", "constant", "--warmup-epochs", "0"]


@pytest.fixture
def set_accuracies(monkeypatch):
    """Returns a function that sets the test accuracies of the next epochs."""

    def set_next(*accuracies: float) -> None:
        left = iter(accuracies)
        found = lambda *_, **__: {"test_loss": 1.0, "test_accuracy": next(left)}
        monkeypatch.setattr(CustomTask, "test", found)

    return set_next


def test_training_stops_early_and_keeps_the_best_epoch(set_accuracies, tmp_path, capsys):
    set_accuracies(0.5, 0.9, 0.7, 0.9, 0.8)
    output = tmp_path / "run"
    flags = [*FLAGS, "--epochs", "5", "--patience", "2", "--keep", "1", "--save-every", "0", "--output", str(output)]
    assert main(flags) == 0
    assert "stopped early: no improvement on test_accuracy 0.9 of epoch 2 in 2 epochs" in capsys.readouterr().out
    summary = json.loads((output / "summary.json").read_text())
    # A tie does not count as better: the first of two equal epochs is the best.
    assert (summary["epochs"], summary["best_epoch"]) == (4, 2)
    for folder, step in (("checkpoints", 4), ("best", 2)):
        with Checkpoints(output / folder) as checkpoints:
            assert checkpoints.steps == [step]
    # --best uses the checkpoint of that epoch.
    config = Config(devices=1, batch_size=400, schedule="constant", warmup_epochs=0, output=output)
    data = CustomTask.open(config)
    last, best = (
        run_variables(
            CustomTask(dataclasses.replace(config, best=best), DataParallel(1), data),
            RunFolder(output),
        ).params
        for best in (False, True)
    )
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, last, best)))
    # A longer run continues from the last epoch and remembers the best one.
    set_accuracies(0.6, 0.95, 0.1)
    assert main([*flags[:-2], "--output", str(output), "--resume", "--epochs", "6", "--patience", "4"]) == 0
    assert json.loads((output / "summary.json").read_text())["best_epoch"] == 6
    with Checkpoints(output / "best") as checkpoints:
        assert checkpoints.steps == [6]


def test_curves_are_drawn_without_a_finished_epoch(tmp_path):
    """For example, a run stopped in its first epoch; the tests of the scripts cover finished runs."""
    plot_curves(tmp_path / "curves.png", [], "title", CustomTask.panels)
    with Image.open(tmp_path / "curves.png") as plot:
        assert min(plot.size) > 300


def test_top_5_counts_labels_among_the_five_largest_logits():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(64, 9)).astype(np.float32), rng.integers(0, 9, 64)
    for rounded in (logits, np.round(logits), np.zeros_like(logits)):  # ties are broken as by a stable sort
        ranked = np.argsort(-rounded, axis=1, kind="stable")
        found = jax.jit(correct)(rounded, labels)
        assert found["top5_accuracy"].tolist() == [labels[i] in ranked[i, :5] for i in range(64)]
        assert found["accuracy"].tolist() == [labels[i] == ranked[i, 0] for i in range(64)]
    assert "top5_accuracy" not in correct(logits[:, :5], labels % 5)


class FakeRun:
    """The parts of a `wandb.init` result that are used."""

    def __init__(self, **arguments) -> None:
        self.id, self.arguments, self.lines, self.finished = arguments["id"] or "abc", arguments, [], False

    def log(self, values, step) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished = True


class FakeClient:
    """The parts of `mlflow.MlflowClient` that are used."""

    params, metrics, ended = {}, [], []

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"experiment {name}"

    def create_run(self, experiment, run_name):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def log_param(self, run, key, value) -> None:
        self.params[key] = value

    def log_metric(self, run, key, value, step) -> None:
        self.metrics.append((run, key, value, step))

    def set_terminated(self, run) -> None:
        self.ended.append(run)


def test_metrics_go_to_every_sink_and_resume_the_same_run(set_accuracies, monkeypatch, tmp_path):
    runs = []
    init = lambda **arguments: runs.append(FakeRun(**arguments)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=FakeClient))
    output = tmp_path / "run"
    flags = [*FLAGS, "--output", str(output), "--log-to", "wandb", "mlflow"]
    set_accuracies(0.5, float("nan"))
    assert main([*flags, "--epochs", "2"]) == 0
    assert not (output / "tensorboard").exists()
    (run,) = runs
    assert run.finished
    assert (run.arguments["project"], run.arguments["config"]["batch_size"]) == ("mpjax-custom", 400)
    steps = [step for step, _ in run.lines]
    assert steps == sorted(steps) == [1, 1, 2, 2]
    epochs = [values for _, values in run.lines if "learning_rate" in values]
    assert [values.get("test_accuracy") for values in epochs] == [0.5, None]  # NaN is not logged
    assert FakeClient.params["policy"] == "mixed_float16"
    name = "experiment mpjax-custom/run"
    assert (name, "test_accuracy", 0.5, 1) in FakeClient.metrics
    assert {(run, step) for run, key, _, step in FakeClient.metrics if key == "step/loss_scale"} == {
        (name, step) for step in (1, 2)
    }
    set_accuracies(0.6)
    assert main([*flags, "--epochs", "3", "--resume"]) == 0
    assert runs[1].id == "abc"
    assert FakeClient.ended == [name, name]


def refuse(**_) -> None:
    raise ConnectionError("no route to the server")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, 'pip install "mpjax[wandb]"'),
        (types.SimpleNamespace(init=refuse), "--log-to wandb: no route to the server"),
    ],
)
def test_sink_that_cannot_be_opened_is_reported_in_one_line(module, message, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", module)
    with (
        pytest.raises(UsageError, match=re.escape(message)),
        Sinks(["wandb"], RunFolder(tmp_path), {"script": "x"}) as s,
    ):
        s.open(0)


def test_lost_process_is_reported_in_one_line(monkeypatch, tmp_path, capsys):
    lost = RuntimeError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    assert not peer_lost(lost)  # in a run of one process
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        assert peer_lost(lost)
        assert not peer_lost(RuntimeError("INVALID_ARGUMENT: shapes"))

    def fail(_) -> None:
        raise lost

    def leave(code: int) -> None:
        ended.append(code)
        raise KeyboardInterrupt

    ended: list[int] = []
    monkeypatch.setattr(CustomTask, "initial_state", fail)
    monkeypatch.setattr("examples.common.loop.peer_lost", lambda error: error is lost)
    # The real function ends the process, because JAX's own exit would wait for the lost one.
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(KeyboardInterrupt):
        main([*FLAGS, "--epochs", "1", "--output", str(tmp_path / "run")])
    assert ended == [2]
    error = capsys.readouterr().err
    assert "another process of this run has ended (UNKNOWN: Gloo all-reduce failed" in error
    assert "Restart all of them with --resume" in error
