"""The benchmark of lean state: its forms train a task, and the committed results agree with the documentation."""

import json

import pytest

from benchmarks import RESULTS, lean_state

LEANEST = "stochastic_rounding, low_bit_state int8"


def test_bytes_per_parameter():
    kept = {form: lean_state.bytes_kept(form) for form in lean_state.FORMS}
    assert kept["float32"] == pytest.approx(12, abs=0.01)
    assert kept["master_weights"] == pytest.approx(14, abs=0.01)
    assert 4 < kept[LEANEST] < 4.2


def test_committed_final_losses_are_within_a_deviation_of_float32():
    results = json.loads((RESULTS / "lean_state_cpu.json").read_text())["results"]
    assert len(results["parity"]) >= 3
    for found in results["parity"].values():
        assert all(len(losses) >= 5 for losses in found.values())
        assert all(abs(lean_state.deviations(losses, found["float32"])) < 1 for losses in found.values())
    assert (RESULTS / "lean_state_cpu.md").read_text() == lean_state.table(results)
