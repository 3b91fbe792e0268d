"""The custom script, a template for users, has the features of the other scripts."""

from __future__ import annotations

import json

import pytest

from examples.custom.__main__ import main

pytestmark = pytest.mark.usefixtures("stored_programs")

# The same as in tests/examples/common/test_parity.py, so that both use the same compiled programs.
FLAGS = ["--epochs", "2", "--devices", "1", "--batch-size", "128"]


@pytest.fixture(scope="module")
def trained(stored_programs, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "run"
    assert main([*FLAGS, "--output", str(output), "--export", "bfloat16"]) == 0
    return output


def test_custom_task_learns_and_exports(trained):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.8
    assert summary["export_test_accuracy"] > 0.8


def test_custom_task_is_inspected(trained, capsys):
    assert main([*FLAGS, "--numerics", "--init-from", str(trained)]) == 0
    assert "largest safe loss scale" in capsys.readouterr().out
    assert main([*FLAGS, "--audit"]) == 0
    assert "float16" in capsys.readouterr().out
