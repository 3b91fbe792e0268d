"""Comparisons of whole trainings: of NumPy programs that cost nothing, whose answers are known."""

import json

import numpy as np
import pytest

import mpjax
from mpjax.inspection.comparison.statistics import parted_at
from mpjax.inspection.comparison.training import run_training

STEPS = 40


class Descent:
    """Least squares by gradient descent in NumPy; a policy rounds its gradients, or spoils them from a step on."""

    def __init__(self, rounding=0.0, spoiled_from=None, steps=STEPS, seed_of_data=None, dies_at=None):
        self.rounding, self.spoiled_from, self.steps = rounding, spoiled_from, steps
        self.seed_of_data, self.dies_at = seed_of_data, dies_at

    def training(self, seed):
        rng = np.random.default_rng(seed if self.seed_of_data is None else self.seed_of_data)
        xs = rng.normal(size=(self.steps, 16, 4))

        def step(state, x):
            w, number = state
            y = x @ np.arange(1.0, 5.0) + 0.3 * np.sin(10 * x[:, 0])
            error = x @ w - y
            gradient = x.T @ error / len(x)
            if self.rounding:
                gradient = np.round(gradient / self.rounding) * self.rounding
            if self.spoiled_from is not None and number >= self.spoiled_from:
                gradient = gradient * 0.0
            if self.dies_at is not None and number >= self.dies_at:
                gradient = gradient * np.nan
            return (w - 0.1 * gradient, number + 1), np.float32(np.mean(error**2))

        def metric(state):
            x = np.random.default_rng(99).normal(size=(200, 4))
            return -np.mean((x @ state[0] - x @ np.arange(1.0, 5.0)) ** 2)

        return (np.zeros(4), 0), step, list(xs), metric


WAYS = {
    "float32": Descent(),
    "the same": Descent(),
    "rounded": Descent(rounding=1e-4),
    "spoiled": Descent(spoiled_from=15),
    "diverges": Descent(dies_at=30),
    "shorter": Descent(steps=STEPS - 1),
    "other data": Descent(seed_of_data=7),
}


def make(policy, seed):
    return WAYS[policy].training(seed)


def compared(*policies, seeds=4, **options):
    return mpjax.parity(make, policies, seeds, **options)


@pytest.fixture(scope="module")
def report():
    return compared("the same", "rounded", "spoiled", "diverges")


def test_an_identical_policy_has_a_difference_of_exactly_zero_and_is_equal(report):
    same = report["the same"]
    assert set(same.differences) == {0.0}
    assert same.interval == (0.0, 0.0, 0.0)
    assert report.verdict("the same") == "equal: identical in every seed"


def test_each_policy_gets_its_verdict(report):
    assert report.verdict("rounded").startswith("equal within seed noise: ")
    assert not report["rounded"].identical
    assert report.verdict("spoiled").startswith("worse by ")
    assert report.verdict("diverges") == "worse: 4 of 4 runs diverged"
    assert report.failure() == "worse than float32: spoiled, diverges"


def test_the_curves_part_where_the_policy_was_spoiled(report):
    base = report.runs_of("float32")
    # The first update that is lost is that of step 16: its loss is computed before.
    assert 16 <= parted_at(report.runs_of("spoiled"), base) <= 18
    assert parted_at(report.runs_of("the same"), base) is None
    assert parted_at(report.runs_of("diverges"), base) in (31, 32)
    by_policy = {evidence.policy: evidence for evidence in report.evidence}
    assert by_policy["spoiled"].parted_at == parted_at(report.runs_of("spoiled"), base)
    assert "give Training(loss=...)" in by_policy["spoiled"].notes[0]


def test_text_has_the_finding_first_and_fits_100_columns(report):
    text = report.text(all=True)
    assert text.splitlines()[0] == "the same: equal: identical in every seed"
    assert [line for line in text.splitlines() if len(line) > 100] == []
    assert "Why spoiled is worse" in text
    assert f"the loss curves part from float32's at step {report.evidence[0].parted_at}" in text


def test_json_csv_and_page_say_the_same(report):
    found = json.loads(report.to_json())
    rows = {row["policy"]: row for row in found["comparisons"]}
    assert rows["spoiled"]["kind"] == "worse"
    assert rows["spoiled"]["verdict"] == report.verdict("spoiled")
    assert len(found["runs"]) == 5 * 4
    assert len(found["runs"][0]["losses"]) == STEPS
    assert len(report.to_csv().splitlines()) == 5
    assert report.verdict("spoiled") in report.to_html()


def test_the_page_has_the_figure(tmp_path):
    report = compared("rounded", "diverges", seeds=3)
    report.plot(tmp_path / "parity.png")
    assert (tmp_path / "parity.png").read_bytes()[:4] == b"\x89PNG"
    assert "data:image/png;base64" in report.to_html()


def counted():
    """`make`, and the runs that it made."""
    calls = []

    def make(policy, seed):
        calls.append((policy, seed))
        return WAYS[policy].training(seed)

    return make, calls


def test_runs_are_interleaved_seed_by_seed():
    make, calls = counted()
    mpjax.parity(make, ["rounded"], (3, 5))
    assert calls == [("float32", 3), ("rounded", 3), ("float32", 5), ("rounded", 5)]


@pytest.mark.parametrize("policy", ["shorter", "other data"])
def test_policies_that_see_other_batches_are_refused(policy):
    with pytest.raises(ValueError, match=rf"seed 0 has other batches under '{policy}'"):
        compared(policy, seeds=1)


def test_a_step_may_return_the_losses_of_several_steps():
    def step(state, xs):
        return state + 1, np.asarray([1.0, 2.0, 3.0])

    run = run_training(mpjax.inspection.Training(0, step, range(2), float), "float32", 0)
    assert run.losses == (1.0, 2.0, 3.0, 1.0, 2.0, 3.0)
    assert run.metric == 2.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (3, "returned a int"),
        (
            (0, 1),
            r"returned a tuple of 2; return an mpjax.inspection.Training, or a tuple \(state, step, batches, metric\)",
        ),
        ((0, 1, [0], float), "returned a step that is not a function"),
        ((0, lambda s, b: s, [0], float), r"step returned a int; return \(state, loss\)"),
        ((0, lambda s, b: (s, s, s), [0], float), "step returned 3 values"),
        ((0, lambda s, b: (s, np.ones((2, 2))), [0], float), r"loss of shape \(2, 2\)"),
        ((0, lambda s, b: (s, 0.0), [], float), "are empty; give at least one"),
    ],
)
def test_a_wrong_return_value_of_make_is_refused(returned, message):
    with pytest.raises((TypeError, ValueError), match=message):
        mpjax.parity(lambda policy, seed: returned, seeds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "seeds=0"),
        ({"seeds": (1, 1)}, "distinct seeds"),
        ({"policies": "mixed_float16"}, "is one string"),
        ({"policies": ["float32"]}, "not the baseline"),
    ],
)
def test_calls_that_compare_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mpjax.parity(make, **{"policies": ["rounded"], **options})
