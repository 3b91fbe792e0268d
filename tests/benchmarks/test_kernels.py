"""No kernel of autocast takes registers that the hand-written step's does not; what the table of kernels compares."""

from __future__ import annotations

import pytest

from benchmarks import kernels
from benchmarks.kernels import AS_MEASURED, AUTO, CELLS, FAIR, HAND, Crowded
from mpjax.planning.target import TARGETS


@pytest.fixture(scope="module")
def plugin():
    if TARGETS["h200"].devices() is None:
        pytest.skip(TARGETS["h200"].missing)


@pytest.mark.parametrize("model", [*CELLS])
def test_no_kernel_spills_or_is_crowded_unless_by_hand(model, plugin):
    sizes = {} if model == "resnet50" else {"layers": 1}
    assert kernels.alarms(model, **sizes) == []


@pytest.mark.parametrize(
    ("by_hand", "found", "count"),
    [
        ([], [("softmax", 0, 8)], 1),
        ([("softmax", 0, 8)], [("softmax", 0, 8)], 0),
        ([("softmax", 0, 8)], [("softmax", 256, 8)], 1),
        ([("softmax", 16, 8)], [("softmax", 256, 8)], 0),
        ([("norm", 0, 8)], [("softmax", 0, 4)], 1),
    ],
)
def test_a_counterpart_by_hand_excuses_what_it_does_itself(by_hand, found, count, monkeypatch):
    steps = iter([by_hand, found])
    monkeypatch.setattr(kernels, "compiled", lambda cell, workload: next(steps))
    monkeypatch.setattr(kernels, "crowded", lambda step: [Crowded("fusion", name, 0.1, *rest) for name, *rest in step])
    assert len(kernels.alarms("gpt2_medium")) == count


def test_each_row_is_compared_with_its_own_baseline():
    def row(milliseconds, planned_bytes=8_000_000_000):
        return {
            "milliseconds": milliseconds,
            "tensor_core_milliseconds": 4.0,
            "planned_bytes": planned_bytes,
            "kernels": 1000,
        }

    measured = {
        HAND: {"milliseconds": 20.0, "tensor_core_share": 0.2},
        AUTO: {"milliseconds": 9.0, "tensor_core_share": 0.5},
    }
    rows = {HAND: row(9.0), FAIR: row(10.0), AUTO: row(8.0, 6_000_000_000), AUTO + AS_MEASURED: row(9.0)}
    text = kernels.table({"bert_base_128": rows}, {"bert_base_128": measured})
    lines = {line.split(" | ")[1]: line.split(" | ")[2:] for line in text.splitlines() if "bert_base_128" in line}
    assert lines[AUTO][:2] == ["8.0 ms", "0.80"]  # of the fair baseline
    assert lines[AUTO][4:8] == ["-", "-", "-", "-"]  # another version was measured
    assert lines[AUTO][8:10] == ["6.00 GB", "0.750"]
    assert lines[AUTO + AS_MEASURED][4:8] == ["9.0 ms", "1.00", "4.5 ms", "1.11"]
    assert lines[HAND][4:6] == ["20.0 ms", "0.45"]
    assert "modelled, not measured" in text.lower()
