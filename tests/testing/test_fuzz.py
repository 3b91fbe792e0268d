"""The fuzzer's own parts: batches, reduction, the report; and the NumPy evaluator that it relies on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from testing import fuzz
from testing.random_programs import Case, Failure, Rejected, check, numbered_case, properties
from testing.random_programs.evaluate import evaluate
from testing.random_programs.reduction import shrink

ROWS_BY_MATRIX = """
def program(w, x, b, s, n):
    unread = jnp.sin(b)
    y = jnp.tanh(marked(x @ w))
    return y, b
"""


@pytest.mark.parametrize("explicit", [False, True])
def test_a_correct_program_passes(explicit):
    assert check(Case(ROWS_BY_MATRIX.replace("x @", "sharded(x) @"), "grad", explicit=explicit)) == "checked"


def test_failures_shared_with_jit_are_rejected():
    rule_needs_an_axis = """
def program(w, x, b, s, n):
    def summed(a):
        return lax.scan(lambda c, _: (lax.psum(jnp.sin(c), 'rows'), None), a, None, length=1)[0]
    return jax.vmap(halved_jvp(summed), axis_name='rows')(x),
"""
    assert check(Case(rule_needs_an_axis, "value"))
    with pytest.raises(Rejected):
        check(Case(rule_needs_an_axis, "grad"))


def _only(wrong):
    """A caster that does something wrong, in place of autocast."""
    return lambda case, fun: wrong(fun)


def _without_marks(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    live = jaxpr.jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if eqn.outvars])
    return tuple(jax.core.eval_jaxpr(live, jaxpr.consts, *args))


@pytest.mark.parametrize(
    ("wrong", "property"),
    [
        (lambda fun: fun, "float32 matmul"),
        (lambda fun: lambda *args: jax.tree.map(lambda x: x.astype(jnp.float16), fun(*args)), "structure"),
        (lambda fun: lambda *args: fun(*args)[0], "structure"),
        (lambda fun: lambda *args: (*fun(*args)[:-1], True), "structure: type of a result"),
        (lambda fun: lambda *args: _without_marks(fun, *args), "structure: a mark is lost"),
        (lambda fun: lambda *args: 1 / 0, "runs"),
        (lambda fun: mpjax.autocast(lambda *args: jax.tree.map(lambda x: 1.1 * x, fun(*args))), "by hand"),
    ],
    ids=["left alone", "dtype", "tree", "no array", "no mark", "raises", "another value"],
)
def test_each_wrong_caster_is_caught(monkeypatch, wrong, property):
    monkeypatch.setattr(Case, "cast", _only(wrong))
    monkeypatch.setattr(properties, "check_plan", lambda *args: None)
    with pytest.raises(Failure) as found:
        check(Case(ROWS_BY_MATRIX, "value"))
    assert found.value.signature.startswith(property)


def test_shrinking_keeps_the_failure():
    smallest = shrink(Case(ROWS_BY_MATRIX, "outside_grad", rules="full"), lambda case: "x @ w" in case.source)
    assert (smallest.transform, smallest.rules) == ("value", "default")
    assert "x @ w" in smallest.source
    assert "sin" not in smallest.source


def test_a_run_continues_from_its_reports(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "examine_all", lambda cases, compiled: [("checked", None)] * len(cases))
    for examples in (4, 8):
        reports = {dtype: fuzz.Report(tmp_path / dtype) for dtype in ("float16", "bfloat16")}
        fuzz.run(reports, fuzz.Options(examples, batch=4))
    for report in reports.values():
        in_a_row = report.data["passed_in_a_row"]
        assert (report.examples, report.data["batches"], in_a_row["all"]) == (8, 2, 8)
        assert sum(in_a_row.values()) == 16, "each example counts for all and for its rules"


@pytest.mark.parametrize("transform", ["vmap", "outside_grad"])
def test_both_dtypes_of_a_program_are_examined(monkeypatch, transform):
    cases = [Case(ROWS_BY_MATRIX, transform, dtype) for dtype in ("bfloat16", "float16")]
    assert fuzz.examine_all(cases, compiled=False) == [("checked", None)] * 2

    def wrong_in_float16(case, fun):
        rules = mpjax.Rules(deny=["dot_general"]) if case.dtype == "float16" else None
        return mpjax.autocast(fun, f"mixed_{case.dtype}", rules=rules)

    monkeypatch.setattr(Case, "cast", wrong_in_float16)
    assert [outcome for outcome, _ in fuzz.examine_all(cases, compiled=False)] == ["checked", "failed"]


def test_a_number_is_one_program_in_the_dtype_that_was_asked_for():
    for number in range(20):
        cases = {dtype: numbered_case(number, dtype) for dtype in fuzz.DTYPES}
        assert {case.dtype: case.source for case in cases.values()} == dict.fromkeys(
            fuzz.DTYPES, cases["float16"].source
        )


def test_the_evaluator_agrees_with_jax():
    def fun(w, x):
        def turn(carry, row):
            carry = jnp.where(row.sum() > 0, carry @ w, carry)
            return carry, jax.nn.softmax(carry).at[0].add(row[0])

        carry, rows = jax.lax.scan(turn, x, x, reverse=True)
        count, last = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.cumsum(c[1] @ w, 0)), (0, x))
        picked = jax.lax.cond(x[0, 0] > 0, lambda: last.max(1), lambda: last.min(1))
        return carry, rows, count, picked, jax.vmap(lambda r: jnp.sort(r)[::-1])(x), jnp.pad(x, 1)[:, ::2]

    w, x = jnp.array([[0.1, 0.5], [-0.4, 0.2]]), jnp.array([[0.3, -0.6], [0.8, 0.9], [-2.0, 0.1]])
    for found, expected in zip(evaluate(jax.make_jaxpr(fun)(w, x), (w, x)), fun(w, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_dtype_of_training_programs_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fuzz", "--training", "--dtype", "float16"])
    with pytest.raises(SystemExit, match="2"):
        fuzz.main()
    assert "no effect" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_thousand_programs_have_all_properties(tmp_path):
    reports = {dtype: fuzz.Report(tmp_path / dtype) for dtype in fuzz.DTYPES}
    fuzz.run(reports, fuzz.Options(1000, first=10**6, compile_every=0))
    for report in reports.values():
        assert not report.data["failures"], str(report)
        assert report.examples == 1000
