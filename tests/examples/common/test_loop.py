"""The training loop of the scripts: the best epoch, early stopping, checkpoint retention and metric sinks."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from examples.common.checkpoints import Checkpoints
from examples.common.run_folder import RunFolder
from examples.common.training import DataParallel
from examples.custom.__main__ import Config, CustomTask, main
from examples.imagenet.train import correct

pytestmark = pytest.mark.usefixtures("quick_programs")

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
        CustomTask(dataclasses.replace(config, best=best), DataParallel(1), data)
        .run_variables(RunFolder(output))
        .params
        for best in (False, True)
    )
    assert not all(jax.tree.leaves(jax.tree.map(np.array_equal, last, best)))
    # A longer run continues from the last epoch and remembers the best one.
    set_accuracies(0.6, 0.95, 0.1)
    assert main([*flags[:-2], "--output", str(output), "--resume", "--epochs", "6", "--patience", "4"]) == 0
    assert json.loads((output / "summary.json").read_text())["best_epoch"] == 6
    with Checkpoints(output / "best") as checkpoints:
        assert checkpoints.steps == [6]


def test_top_5_counts_labels_among_the_five_largest_logits():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(64, 9)).astype(np.float32), rng.integers(0, 9, 64)
    for rounded in (logits, np.round(logits), np.zeros_like(logits)):  # ties are broken as by a stable sort
        ranked = np.argsort(-rounded, axis=1, kind="stable")
        found = jax.jit(correct)(rounded, labels)
        assert found["top5_accuracy"].tolist() == [labels[i] in ranked[i, :5] for i in range(64)]
        assert found["accuracy"].tolist() == [labels[i] == ranked[i, 0] for i in range(64)]
    assert "top5_accuracy" not in correct(logits[:, :5], labels % 5)
