"""The notebook runs, and shows what it was stored with."""

import json

import pytest

from docs.notebook import NOTEBOOK, executed


@pytest.mark.standard_promotion
def test_the_notebook_runs_and_shows_what_it_stores():
    stored = json.loads(NOTEBOOK.read_text())
    again = executed(stored)
    kinds = lambda cell: [(output["output_type"], sorted(output.get("data", {}))) for output in cell["outputs"]]
    shown = 0
    for old, new in zip(stored["cells"], again["cells"], strict=True):
        if old["cell_type"] != "code":
            continue
        assert kinds(old) == kinds(new), "run python -m docs.notebook"
        for before, after in zip(old["outputs"], new["outputs"], strict=True):
            if "data" in after:
                assert "<table" in "".join(after["data"]["text/html"])
                shown += "100.0% in half" in "".join(after["data"]["text/plain"])
                assert ("100.0% in half" in str(before)) == ("100.0% in half" in str(after))
    assert shown == 2  # `explain` and `audit` agree
    losses = [line.split()[3] for cell in again["cells"] for line in _printed(cell)]
    assert float(losses[-1].strip(",")) < 0.2


def _printed(cell):
    return [line for output in cell.get("outputs", []) for line in output.get("text", [])]
