"""The cases of a parametrised test that run."""

import itertools

import pytest

from tests import sampling


def table(**parameters):
    return [dict(zip(parameters, values, strict=True)) for values in itertools.product(*parameters.values())]


@pytest.fixture
def covering(monkeypatch):
    monkeypatch.setattr(sampling, "COVERING", True)


@pytest.mark.usefixtures("covering")
def test_each_pair_of_values_of_three_parameters_runs():
    cases = table(name="abcdefgh", dtype=("bfloat16", "float16"), scan="ny")
    kept = [cases[i] for i in sampling.sampled("test", cases)]
    assert len(kept) == len(cases) / 2
    pairs = lambda chosen: {pair for case in chosen for pair in itertools.combinations(case.items(), 2)}
    assert pairs(kept) == pairs(cases)


@pytest.mark.usefixtures("covering")
def test_three_of_four_parameters_run_together():
    cases = table(name="abcdef", dtype=("bfloat16", "float16"), scan="ny", gradient="ny")
    kept = [cases[i] for i in sampling.sampled("test", cases)]
    assert len(kept) < 0.7 * len(cases)
    assert {(c["name"], c["scan"], c["gradient"]) for c in kept} == {*itertools.product("abcdef", "ny", "ny")}


@pytest.mark.usefixtures("covering")
def test_each_value_of_two_parameters_runs_and_dtypes_take_turns():
    cases = table(name="abcdefgh", dtype=("bfloat16", "float16"))
    kept = [cases[i] for i in sampling.sampled("test", cases)]
    assert sorted(case["name"] for case in kept) == list("abcdefgh")
    assert [case["dtype"] for case in kept].count("float16") == 4


@pytest.mark.usefixtures("covering")
@pytest.mark.parametrize("cases", [[{}], table(name="abcdefgh"), table(name="abc", dtype="h")])
def test_all_cases_of_one_parameter_run(cases):
    assert len(sampling.sampled("test", cases)) == len(cases)


@pytest.mark.usefixtures("covering")
def test_all_cases_run_if_two_have_the_same_texts():
    cases = table(name="abcdefgg", dtype=("bfloat16", "float16"))
    assert len(sampling.sampled("test", cases)) == len(cases)


@pytest.mark.parametrize(("every", "number"), [(1, 16), (3, 5), (100, 1)])
def test_one_in_so_many_runs_if_a_number_is_given(every, number, monkeypatch):
    monkeypatch.setattr(sampling, "COVERING", False)
    monkeypatch.setattr(sampling, "EVERY", every)
    cases = table(name="abcdefgh", dtype=("bfloat16", "float16"))
    assert number <= len(sampling.sampled("test", cases)) <= number + 1


@pytest.mark.parametrize(("every", "file", "number"), [(1, "examples", 7), (17, "examples", 2), (17, "casting", 7)])
def test_one_in_three_tests_of_whole_scripts_runs_where_cases_are_sampled(every, file, number, monkeypatch):
    monkeypatch.setattr(sampling, "EVERY", every)
    running = sampling.sampled_of_file(f"tests/{file}/test_script.py", 7)
    assert number <= len(running) <= number + (number < 7)
    assert sampling.sampled_of_file(f"tests/{file}/test_script.py", 1) == {0}
