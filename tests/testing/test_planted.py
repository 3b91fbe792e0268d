"""Planted causes: a few of `python -m benchmarks.planted`, each with the answers that the tools must give."""

import pytest

from benchmarks.planted import table
from testing import planted


@pytest.mark.parametrize(
    "name",
    [
        "healthy, plain",
        "overflow, vmap",
        "small gradients, Equinox",
        "epsilon lost, Haiku",
        "nan in a custom rule",
        "nan on a device",
        "norm in half, Linen",
        "norm in half, NNX",
        "overflow before a mask",
        "trap of a where",
        "empty mask",
        "outlier batch",
        "average in half",
        "bad dimension",
    ],
)
def test_each_tool_answers_as_planted(name):
    (cells,) = planted.run([name]).values()
    assert set(cells.values()) == {planted.AS_PLANTED}, cells


def test_every_cause_is_planted_in_every_library():
    assert len(planted.cases()) == len(planted.CAUSES) * len(planted.LIBRARIES) + len(planted.ALONE) >= 40


def test_another_answer_and_a_crash_are_cells():
    def otherwise():
        raise AssertionError("names\nthe head")

    def crash():
        raise KeyError("scan")

    cells = {"audit": planted.outcome(otherwise), "search": planted.outcome(crash)}
    assert cells == {"audit": "answers otherwise: names the head", "search": "fails: KeyError: 'scan'"}
    assert table({"a case": cells}).startswith("0 of 2 answers as planted, 1 programs.")
