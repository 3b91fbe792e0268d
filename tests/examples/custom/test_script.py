"""The custom script, a template for users, has the features of the other scripts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from examples.common.run_folder import RunFolder
from examples.common.training import DataParallel
from examples.custom.__main__ import Config, CustomTask, main
from tests.examples.errors import line_of_error

pytestmark = pytest.mark.usefixtures("quick_programs")

# The same as in tests/examples/common/test_parity.py, so that both use the same compiled programs.
FLAGS = ["--epochs", "2", "--devices", "1", "--batch-size", "128"]


@pytest.fixture(scope="module")
def trained(quick_programs, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "run"
    assert main([*FLAGS, "--output", str(output), "--export", "bfloat16"]) == 0
    return output


def test_batches_that_do_not_fit_are_refused(capsys):
    error = line_of_error(main, ["--batch-size", "33"], capsys)
    assert "--batch-size 33 cannot be divided among 4 devices; use a multiple of 4" in error
    assert "--batch-size 428 is larger than the data" in line_of_error(main, ["--batch-size", "428"], capsys)


def test_custom_task_learns_and_exports(trained):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.8
    assert summary["export_test_accuracy"] > 0.8


def test_entries_without_finite_outputs_count_as_wrong(trained):
    task = CustomTask(config := Config(devices=1, batch_size=128), DataParallel(1), CustomTask.open(config))
    weights = task.run_variables(RunFolder(trained))
    whole = task.test(weights, lambda: None)
    assert whole["test_nonfinite"] == 0
    inputs = task._test.inputs.copy()
    inputs[:20] = np.nan
    task._test = task._test._replace(inputs=inputs)
    found = task.test(weights, lambda: None)
    assert found["test_nonfinite"] == 20
    assert found["test_accuracy"] <= 1 - 20 / task.test_count
    assert np.isfinite(found["test_loss"])


def test_custom_task_is_inspected(trained, capsys):
    assert main([*FLAGS, "--numerics", "--init-from", str(trained)]) == 0
    assert "largest safe loss scale" in capsys.readouterr().out
    assert main([*FLAGS, "--audit"]) == 0
    assert "float16" in capsys.readouterr().out
