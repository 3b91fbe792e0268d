"""Roundings that are amplified, alone and beside a second cause: each tool must answer as planted."""

import pytest

from testing.planted import roundings


@pytest.mark.parametrize("name", roundings.cases())
@pytest.mark.standard_promotion
def test_each_tool_answers_as_planted(name):
    for answer in roundings.cases()[name]().values():
        answer()


def test_a_third_and_more_have_two_causes():
    names = list(roundings.cases())
    assert len([name for name in names if ", and" in name]) >= len(names) / 3
