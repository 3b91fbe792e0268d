"""Trainings of the scripts under `mpjax.parity`, with a few steps on small data."""

from __future__ import annotations

import numpy as np
import pytest

import mpjax
from examples.common.cli import UsageError
from examples.common.parity import Maker
from examples.custom.__main__ import CustomTask

pytestmark = pytest.mark.usefixtures("quick_programs")

FLAGS = ["--epochs", "2", "--devices", "1", "--batch-size", "128"]
SCALED = "mixed_float16 --loss-scale 1"


@pytest.fixture(scope="module")
def make():
    return Maker(CustomTask, FLAGS)


@pytest.fixture(scope="module")
def compared(make):
    """The report of runs with two seeds."""
    return mpjax.parity(make, [SCALED], 2)


def test_a_script_is_compared_over_seeds_with_precision_flags(compared):
    assert compared.title == "Parity of custom"
    assert (compared.metric_name, compared.percent, compared.larger_is_better) == ("test accuracy", True, True)
    runs = compared.runs_of(SCALED)
    assert all(run.metric > 0.8 and run.scales == ((1, 1.0),) for run in runs)
    losses = np.asarray([run.losses for run in runs])
    assert losses.shape == (2, 6)
    assert np.all(losses[:, -1] < losses[:, 0]), "of each step, not sums over the epoch"


def test_unknown_flag_is_named(make):
    with pytest.raises(UsageError, match="--los-scale"):
        make("mixed_float16 --los-scale 1", 0)


def test_evidence_names_the_modules_of_a_script(make, compared):
    from mpjax.inspection.comparison.parity import evidence_of

    found = evidence_of(make, SCALED, "float32", compared.runs_of(SCALED), compared.runs_of("float32"))
    assert found.notes == ()
    assert 0 < found.errors.gradient_error < 0.1
    assert any("Dense_0" in row.name for row in found.errors.parameters)
    assert any("Dense_1" in row.name for row in found.errors.modules)
