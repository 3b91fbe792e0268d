"""`layerwise_error`: own errors, totals, loops, values that leave the range. `testing.planted` has the libraries."""

import csv
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.inspection.cli import main
from mpjax.inspection.lockstep import error_note
from testing.sensitive import KINDS

_rng = np.random.default_rng(0)
X = jax.device_put(_rng.normal(size=(8, 16)).astype(np.float32))
Y = np.arange(8, dtype=np.int32) % 4


def test_a_float32_program_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"nothing in this program is half.*autocast"):
        mpjax.layerwise_error(lambda w: jnp.sum(w * w), np.ones(3, np.float32))


def test_a_healthy_gelu_does_not_need_float32():
    def loss(w, x):
        with jax.named_scope("mlp"):
            return jnp.mean(jax.nn.gelu(x @ w) @ w)

    report = mpjax.layerwise_error(mpjax.autocast(loss), np.eye(16, dtype=np.float32), X)
    assert not any(row.denied for row in report.modules)
    assert "needs float32" not in str(report)


def test_the_gradient_of_a_half_bias_is_no_sum_that_needs_float32():
    def loss(params, x):
        w, b = (p.astype(jnp.bfloat16) for p in params)
        y = jnp.tanh(x.astype(jnp.bfloat16) @ w + b)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    report = mpjax.layerwise_error(loss, [np.eye(16, dtype=np.float32), np.zeros(16, np.float32)], X)
    assert "needs float32" not in str(report)
    assert report.modules[0].op != "reduce_sum"


def test_a_nan_in_both_programs_is_no_agreement():
    def loss(w, x):
        with jax.named_scope("logs"):
            return jnp.mean(jnp.log(x @ w))

    report = mpjax.layerwise_error(mpjax.autocast(loss), -np.eye(16, dtype=np.float32), np.abs(X))
    assert report.loss_error == report.gradient_error == np.inf or report.loss_error == np.inf
    assert any(max(row.total_forward, row.total_backward) == np.inf for row in report.modules)
    assert "not finite" in str(report)


def test_own_errors_are_those_of_exact_operands_and_totals_add_up():
    def loss(w, x):
        with jax.named_scope("first"):
            x = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)
        with jax.named_scope("second"):
            x = x @ w
        return jnp.sum(x * x)

    w = (_rng.normal(size=(16, 16)) / 4).astype(np.float32)
    rows = {row.name: row for row in mpjax.layerwise_error(loss, w, X).modules}
    product = np.asarray(X) @ np.asarray(w)
    rounding = product.astype(jnp.bfloat16).astype(np.float32) - product
    expected = np.linalg.norm(rounding) / np.linalg.norm(product)
    assert rows["first"].forward == pytest.approx(expected, rel=1e-3)
    assert rows["first"].total_forward == rows["first"].forward
    assert rows["second"].forward == 0, "what it gets is rounded, but it does not round"
    assert rows["second"].total_forward > expected / 3


@pytest.mark.parametrize("form", ["scan", "cond", "remat", "while"])
def test_loops_and_branches_are_entered(form):
    def layer(w, x):
        with jax.named_scope("layer"):
            return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    def loss(w, x):
        if form == "scan":
            x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)
        elif form == "cond":
            x = jax.lax.cond(x[0, 0] > 100, lambda x: x, lambda x: layer(w[0], x), x)
        elif form == "while":
            x = jax.lax.stop_gradient(jax.lax.fori_loop(0, jnp.int32(x[0, 0] * 0) + 3, lambda i, x: layer(w[i], x), x))
            x = layer(w[0], x)
        else:
            x = jax.checkpoint(layer)(w[0], x)
        return jnp.sum(x * x)

    w = (_rng.normal(size=(3, 16, 16)) / 4).astype(np.float32)
    report = mpjax.layerwise_error(loss, w, X)
    row = next(row for row in report.modules if row.name == "layer")
    assert 5e-4 < row.forward < 0.02
    assert 5e-4 < row.backward < 0.02
    assert report.gradient_error < 0.05


def test_a_long_program_has_the_same_errors_as_a_short_one():
    # A long one is evaluated operation by operation, a short one in one compiled program.
    def errors(idle):
        def loss(w, x):
            with jax.named_scope("layer"):
                x = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
            for _ in range(idle):
                x = -x
            with jax.named_scope("head"):
                return jnp.mean((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32) ** 2)

        rows = mpjax.layerwise_error(loss, w, X).modules
        return {row.name: (row.forward, row.backward, row.total_forward) for row in rows if row.path}

    w = (_rng.normal(size=(16, 16)) / 4).astype(np.float32)
    short, long = errors(0), errors(200)
    assert short.keys() == long.keys() == {"layer", "head"}
    for name in short:
        np.testing.assert_allclose(long[name], short[name], rtol=0.02)


def test_an_overflow_between_two_constants_is_not_simplified_away():
    def loss(w, x):
        with jax.named_scope("hot"):
            y = w.astype(jnp.float16) * 1e4 * 1e4 * 1e-4 * 1e-4
        return jnp.mean(y.astype(jnp.float32) * x)

    report = mpjax.layerwise_error(loss, np.ones(16, np.float32), X)
    assert {row.name: row.forward for row in report.modules}["hot"] == np.inf


def test_an_overflow_in_half_is_an_infinite_error_of_the_module_that_makes_it():
    def loss(w, x):
        with jax.named_scope("hot"):
            y = (x * 1e4).astype(jnp.float16) @ w.astype(jnp.float16)
        return jnp.mean(jnp.tanh(y.astype(jnp.float32)))

    report = mpjax.layerwise_error(loss, np.ones((16, 4), np.float32), np.abs(X))
    assert report.modules[0].name == "hot"
    assert report.modules[0].forward == np.inf
    assert "not finite" in report.text()
    assert json.loads(report.to_json())["modules"][0]["forward"] == "inf"


def test_errors_of_tiny_and_huge_values_do_not_leave_the_range():
    for size in (1e-30, 1e30):
        arrays = [jax.device_put(np.full(4, x, np.float32)) for x in (size, size * 1.01, size)]
        for note in (error_note, jax.jit(error_note)):  # by NumPy, and compiled
            _, sums, bad = note(*arrays)
            assert np.sqrt(sums[1] / sums[0]) == pytest.approx(0.01, rel=1e-3)
            assert not bad.any()


def test_gradients_of_an_embedding_in_half_are_evaluated_in_float32_too():
    # scatter-add has a sub-jaxpr with dtypes of its own.
    def loss(table):
        return jnp.sum(jnp.take(table.astype(jnp.bfloat16), Y, axis=0).astype(jnp.float32) ** 2)

    assert 0 < mpjax.layerwise_error(loss, _rng.normal(size=(4, 8)).astype(np.float32)).gradient_error < 0.02
    assert not mpjax.numerics(loss, np.ones((4, 8), np.float32), verify=False).unseen


def test_the_command_writes_its_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "hand_half.py").write_text(
        "import jax.numpy as jnp\n"
        "def loss(w):\n"
        "    return jnp.sum(w.astype(jnp.bfloat16).astype(jnp.float32) ** 2), w\n"
        "def make():\n"
        "    return jnp.linspace(1, 2, 8),\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    args = "layerwise_error hand_half:loss --args make --has-aux --csv r.csv --json r.json --html r.html".split()
    assert main(args) == 0
    out = capsys.readouterr().out
    assert out.startswith("loss in half: relative error of the gradients 0.")
    assert max(map(len, out.splitlines())) <= 100
    assert next(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))["dtypes"] == "bfloat16"
    assert "Layerwise error of loss" in (tmp_path / "r.html").read_text()


@pytest.mark.filterwarnings("ignore:autocast. cpu is not known to have float8")
@pytest.mark.parametrize("form", ["loop", "scan"])
def test_the_error_of_float8_matmuls_is_measured(form):
    def loss_fn(params, x):
        if form == "scan":
            x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, params)
        for i, w in enumerate(params if form == "loop" else ()):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(jnp.sin(x) ** 2)

    params = jax.random.normal(jax.random.key(0), (4, 32, 32)) / 6
    x = jax.random.normal(jax.random.key(1), (16, 32))
    options = mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0)))
    low = mpjax.autocast(loss_fn, "mixed_float8", rules=options)
    found = mpjax.layerwise_error(low, params, x)
    exact, rounded = (jax.grad(fun)(params, x) for fun in (loss_fn, low))
    error = float(jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact))
    assert found.gradient_error == pytest.approx(error, rel=0.1)  # Without float8 it is a tenth.
    assert "in half and float8" in str(found)
    assert not any(row.denied for row in found.modules)  # The backward pass of a float8 matmul sets a precision.
    if form == "loop":
        errors = {row.path: row.error for row in found.modules}
        assert min(errors["layer_1"], errors["layer_2"]) > 3 * max(errors["layer_0"], errors["layer_3"])


JUMPS = {"squashed_gaussian": "log", "noisy_or": "log1p", "rotary_angles_by_einsum": "sin"}


@pytest.mark.parametrize("kind", JUMPS)
@pytest.mark.standard_promotion
def test_the_first_line_where_the_total_error_jumps_is_named(kind):
    loss, params, batch = KINDS[kind]
    half = mpjax.autocast(loss, "mixed_bfloat16", rules=mpjax.Rules(level="half"))
    report = mpjax.layerwise_error(half, params, batch)
    assert report.jump is not None
    assert report.jump.op == JUMPS[kind]
    assert report.jump.after > 8 * report.jump.before
    line = f"the total error jumps at {report.jump.source}: from "
    assert " ".join(report.text().split()).count(line) == 1
    assert mpjax.layerwise_error(mpjax.autocast(loss, "mixed_bfloat16"), params, batch).jump is None


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def amplifies(x, is_bad):
    return jnp.where(is_bad, jnp.log(1 - rounded(jnp.tanh(2 * x)) ** 2 + 1e-4), x)


IN_BODIES = {
    "scan": lambda x, bad: jax.lax.scan(lambda x, bad: (amplifies(x, bad), None), x, bad)[0],
    "cond": lambda x, bad: jax.lax.cond(bad.any(), lambda x: amplifies(x, True), lambda x: x, rounded(x)),
}


@pytest.mark.parametrize("form", IN_BODIES)
def test_no_line_behind_a_loop_or_a_branch_is_blamed_for_what_it_did(form):
    def loss(w, x, bad):
        return jnp.mean(IN_BODIES[form](x @ w, bad) ** 2)

    w, x = np.eye(16, dtype=np.float32), np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    report = mpjax.layerwise_error(loss, w, 2 * x, np.arange(4) == 2)
    assert report.gradient_error > 0.05
    line = f"test_layerwise.py:{amplifies.__code__.co_firstlineno + 1}"
    assert report.jump is None or report.jump.source == line, str(report)


@pytest.mark.parametrize("hot", [(1, 5e4), (1, 5e4, 1)])
def test_no_jump_is_from_what_is_not_finite(hot):
    def layer(x, hot):
        y = x.astype(jnp.float16)
        z = y * hot.astype(jnp.float16) * y
        return (z / hot.astype(jnp.float16)).astype(jnp.float32), None

    loss = lambda x, hot: jnp.mean(jax.lax.scan(layer, x, hot)[0] ** 2)
    report = mpjax.layerwise_error(loss, np.full((4, 4), 2, np.float32), np.array(hot, np.float32))
    assert report.loss_error == np.inf
    if len(hot) == 3:  # after the last overflow, all of the loop is infinite
        assert report.jump is None, str(report)
    else:
        line = f"test_layerwise.py:{layer.__code__.co_firstlineno + 2}"
        assert (report.jump.op, report.jump.source) == ("mul", line)
        assert math.isfinite(report.jump.before)


def test_the_unscaling_of_a_gradient_is_no_jump():
    """Of gradients that are flushed to zero, whose error the factor behind the backward pass does not make."""

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) * 1e-5) ** 2) * 1e-4

    w, x = np.eye(8, dtype=np.float32), np.ones((4, 8), np.float32)
    found = mpjax.layerwise_error(mpjax.autocast(loss, "mixed_float16"), w, x, loss_scale=1024.0)
    assert found.gradient_error > 0.5
    assert found.jump is None, found.jump
