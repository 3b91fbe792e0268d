"""What all reports share: JSON that every parser reads, text that fits, one page of HTML."""

import dataclasses
import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.inspection.reports import WIDTH, Report, Section, amount


@dataclasses.dataclass(frozen=True)
class Example(Report):
    data: Any
    title = "example"

    def sections(self):
        text = "a finding that goes on for much longer than any terminal is wide: " + "word " * 40
        rows = [(f"module_{i}/layer", "x" * 150, str(i)) for i in range(30)]
        return [Section("", text), Section("table", "", "module|why|>n", rows)]

    def to_dict(self):
        return {"data": self.data}

    def table(self):
        return [{"a": 1, "b": "x,y"}]


def strict(text):
    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_json_holds_infinities_and_numpy_numbers():
    data = {"low": math.inf, "high": -math.inf, "no": math.nan, "n": np.float32(2), "t": (np.int64(1),), 3: None}
    expected = {"low": "inf", "high": "-inf", "no": "nan", "n": 2.0, "t": [1], "3": None}
    assert strict(Example(data).to_json()) == {"data": expected}


def test_results_with_zeros_and_infinities_are_written_as_json():
    # An operand of zeros has no smallest nonzero element, one of infinities no finite range.
    found = mpjax.find_nonfinite(lambda x, y: jnp.sum(x / y), jnp.zeros(3), jnp.zeros(3))
    assert strict(found.to_json())["found"]["inputs"][0]["min_nonzero"] == "inf"
    report = mpjax.numerics(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.zeros(3))
    assert strict(report.to_json())["parameters"][0]["min_nonzero"] == "inf"


def test_text_fits_and_shows_all_rows_where_asked():
    report = Example(None)
    assert max(map(len, report.text(all=True).splitlines())) <= WIDTH
    assert "and 10 more" in str(report)
    assert "module_29" in report.text(all=True)


def test_csv_has_the_rows_of_the_table(tmp_path):
    assert Example(None).to_csv(tmp_path / "r.csv") == 'a,b\n1,"x,y"\n' == (tmp_path / "r.csv").read_text()


def test_amounts_have_no_exponent():
    found = [amount(number, "B") for number in (0, 512, 999.7, 4096, 999_960, 4.09e9, 2.5e15)]
    assert found == ["0 B", "512 B", "1 kB", "4.1 kB", "1 MB", "4.09 GB", "2500 TB"]
