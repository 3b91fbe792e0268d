"""`search` finds every planted sensitive layer, in few passes, and keeps the FLOPs in half."""

import csv
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.inspection.cli import main
from mpjax.inspection.searching import _fewest
from testing import cheap_keys, measures
from testing.random_programs.evaluate import arrays_in_numpy, in_numpy
from testing.sensitive import KINDS

X = jax.device_put(np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32))


class Sensitive(nn.Module):
    """A small layer that half spoils: by overflow or by cancellation."""

    kind: str

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(1.0), (x.shape[-1], 2))
        y = x @ w
        if self.kind == "overflow":
            y = (300 * x) @ (300 * w) / 9e4
        elif self.kind == "cancels":
            y = (x + 100) @ w - 100 * jnp.sum(w, 0)
        return jnp.tanh(y) @ jnp.ones((2, 1), y.dtype)


class Net(nn.Module):
    planted: tuple = ()

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            kind = dict(self.planted).get(i)
            if kind:
                x = x + 0.3 * Sensitive(kind, name=f"sensitive_{i}")(x)
            x = x + nn.Dense(32, name=f"dense_{i}")(jnp.tanh(x))
        return x


def problem(planted):
    model = Net(tuple(planted.items()))
    params = arrays_in_numpy(model.init)(cheap_keys.key(1), X)
    return lambda params, x: jnp.mean(model.apply(params, x) ** 2), (params, X)


def test_every_planted_layer_is_found():
    planted = {0: "cancels", 1: "overflow"}
    loss_fn, args = problem(planted)
    report = mpjax.search(loss_fn, *args, budget=0.01)
    assert set(report.keep_float32) == {f"Net/sensitive_{i}" for i in planted}, report.text()
    assert report.met
    assert report.error_before > 0.01
    assert report.passes <= 10
    assert report.half_share >= 0.9
    # The rules do what the report says.
    gradient, expected = (
        jax.grad(lambda *args, fun=fun: 1024 * fun(*args))
        for fun in (mpjax.autocast(loss_fn, "mixed_float16", rules=report.rules), loss_fn)
    )
    error = measures.relative_error(in_numpy(gradient)(*args), in_numpy(expected)(*args))
    assert error == pytest.approx(report.error, rel=0.5)
    assert measures.half_share(gradient, *args) == pytest.approx(report.half_share, abs=0.01)
    assert f"rules=mpjax.Rules(deny=[{', '.join(map(repr, report.patterns))}])".replace("'", '"') in " ".join(
        report.text().split()
    )
    assert max(map(len, report.text().splitlines())) <= 100


def test_a_budget_that_half_meets_keeps_nothing_in_float32():
    loss_fn, args = problem({})
    report = mpjax.search(loss_fn, *args, budget=0.05)
    assert report.keep_float32 == report.rules.deny == ()
    assert report.passes == 2
    assert report.half_share == 1.0
    assert "with every module in half" in report.text()
    assert {row.score for row in report.modules} == {None}, "not measured"
    assert "0.00%" not in report.text().partition("By module")[2].replace("FLOPs", "")


def test_code_in_no_module_is_searched_by_line():
    def loss_fn(w, x):
        with jax.named_scope("dense"):
            x = jnp.tanh(x @ w)
        y = (x + 1000) @ w - 1000 * jnp.sum(w, 0)
        return jnp.mean((y @ w) ** 2)

    w = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32) / 6
    report = mpjax.search(loss_fn, w, X, budget=0.02)
    line = loss_fn.__code__.co_firstlineno + 3
    assert report.met, report.text()
    assert report.keep_float32 == report.patterns == report.rules.deny == (f"test_search.py:{line}",)
    assert report.overrides == ()
    assert report.text().startswith(f"1 line must stay in float32: test_search.py:{line}\n")
    assert 0.4 < report.half_share < 0.9


def test_a_budget_that_nothing_meets_says_where_the_rest_is():
    @mpjax.half_function
    def kernel(x, w):
        return jnp.tanh(x @ w) @ w

    def loss_fn(w, x):
        return jnp.mean(kernel(x, w) ** 2)

    report = mpjax.search(loss_fn, np.full((32, 32), 0.03, np.float32), X, policy="mixed_bfloat16", budget=0.0)
    assert not report.met
    assert "casts of the code itself" in report.text()
    assert report.failure()


@pytest.mark.parametrize("kind", ["optical_flow", "squashed_gaussian", "twin_critics"])
def test_one_rule_is_tried_before_any_module(kind):
    loss, params, batch = KINDS[kind]
    forced = mpjax.Rules(allow=["tanh", "floor", "log", "exp", "square", "integer_pow"])
    cast = mpjax.autocast(loss, "mixed_bfloat16", rules=forced)
    report = mpjax.search(cast, params, batch, budget=0.05)
    assert report.met, report.text()
    if report.error_before > 0.05:
        assert report.added
        assert report.error < report.error_before


class Passes:
    """Errors that depend on the modules in float32."""

    def __init__(self, errors, most=1000):
        self.errors, self.seen, self.most = errors, {}, most

    @property
    def ended(self):
        return len(self.seen) >= self.most

    def error(self, kept):
        key = frozenset(kept)
        if key not in self.seen and len(self.seen) >= self.most:
            return float("inf")
        return self.seen.setdefault(key, self.errors(set(kept)))


@pytest.mark.parametrize("needed", list(itertools.combinations("abcdef", 2)))
def test_modules_that_are_not_needed_return_to_half(needed):
    passes = Passes(lambda kept: 0 if {*needed} <= kept else 1)
    assert _fewest(passes, [*"abcdef"], 0.5) == (tuple(needed), True)


def test_a_module_that_another_one_replaces_returns_to_half():
    # c alone would do, and so would a and b together.
    passes = Passes(lambda kept: 0 if "c" in kept or {"a", "b"} <= kept else 1)
    kept, minimal = _fewest(passes, [*"abc"], 0.5)
    assert (set(kept), minimal) in (({"c"}, True), ({"a", "b"}, True))


@pytest.mark.filterwarnings("ignore:autocast. cpu is not known to have float8")
def test_a_search_in_float8_gives_modules_back_to_bfloat16():
    # One element of `outlier`'s operand is so large that the scale of the others flushes them to zero.
    def loss_fn(params, x):
        for i, name in enumerate(("first", "plain", "outlier", "last")):
            with jax.named_scope(name):
                spike = jnp.zeros(16).at[0].set(1e6) if name == "outlier" else 0.0
                x = jnp.tanh((x + spike) @ params[i])
        return jnp.sum(jnp.sin(x))

    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (16, 16)) / 4 for key in keys]
    params[2] = params[2].at[0].set(0.0)
    found = mpjax.search(
        mpjax.autocast(loss_fn, "mixed_float8", rules=mpjax.Rules(float8=mpjax.Float8(min_size=(0, 0)))),
        params,
        X.reshape(16, 16),
        budget=0.3,
    )
    assert found.met, found.text()
    assert found.keep_float32 == ("outlier",)
    assert found.rules.float8.deny == found.patterns
    assert found.rules.deny == ()
    assert found.overrides == (("*/outlier", "mixed_bfloat16"),)
    assert "rules=mpjax.Rules(float8=mpjax.Float8(deny=[" in found.text()


def test_a_search_that_ends_early_keeps_what_was_measured():
    names = [f"m{i}" for i in range(64)]
    for most in range(2, 12):
        passes = Passes(lambda kept: 0 if {"m3", "m5"} <= kept else 1, most)
        kept, minimal = _fewest(passes, names, 0.5)
        assert not minimal
        assert passes.seen.get(frozenset(kept), 0) == 0


def test_a_deep_model_keeps_no_more_than_it_needs_and_says_when_the_passes_end():
    def loss_fn(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                y = x @ w
                x = jnp.tanh((x + 1000) @ w - 1000 * jnp.sum(w, 0) if i == 8 else y)
        return jnp.mean(x**2)

    params = list(np.random.default_rng(0).normal(size=(12, 16, 16)).astype(np.float32) / 4)
    report = mpjax.search(loss_fn, params, X.reshape(-1, 16), budget=0.02)
    assert report.keep_float32 == ("layer_8",), report.text()
    assert report.minimal
    tight = mpjax.search(loss_fn, params, X.reshape(-1, 16), budget=0.0007)
    assert tight.met
    assert tight.passes <= 13
    assert tight.minimal or "stopped at the limit of passes" in tight.text()


def test_wrong_calls_say_what_is_wrong():
    with pytest.raises(ValueError, match="computes in float32"):
        mpjax.search(jnp.sum, X, policy="float32")
    with pytest.raises(ValueError, match="budget=-1"):
        mpjax.search(jnp.sum, X, budget=-1)


def test_the_command_takes_policy_and_budget(tmp_path, monkeypatch, capsys):
    (tmp_path / "searched.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(w, x):\n"
        "    with jax.named_scope('hot'):\n"
        "        y = (300 * x) @ (300 * w) / 9e4\n"
        "    with jax.named_scope('mild'):\n"
        "        return jnp.mean((y @ w) ** 2)\n"
        "def make():\n"
        "    return jnp.full((8, 8), 0.5), jnp.ones((4, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main("search searched:loss --args make --budget 0.01 --csv r.csv --policy mixed_float16".split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 module must stay in float32: hot\n")
    assert [row["float32"] for row in csv.DictReader((tmp_path / "r.csv").read_text().splitlines())] == [
        "True",
        "False",
    ]


def test_a_wrapper_is_searched_with_its_own_code():
    cast = mpjax.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w)))

    @functools.wraps(cast)
    def wrapper(w, x):
        return cast(w, x) + jnp.mean((3e3 * x) @ (3e3 * w) @ w) / 1e9

    args = jnp.ones((8, 8)), jnp.ones((4, 8))
    assert mpjax.search(wrapper, *args).error_before == float("inf")
    assert mpjax.search(jax.jit(cast), *args).policy == mpjax.search(cast, *args).policy


def test_the_reference_of_a_search_is_float32_throughout():
    inner = mpjax.autocast(lambda w, x: jnp.tanh(x @ w) @ w, "mixed_bfloat16")
    w = jax.device_put(np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32) / 6)
    assert mpjax.search(lambda w, x: jnp.mean(inner(w, x) ** 2), w, X).error_before > 1e-3


def test_gradients_that_are_not_finite_in_float32_get_no_advice():
    def loss(w, x):
        with jax.named_scope("root"):
            return jnp.mean(jnp.sqrt(x @ w))

    w = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32)
    report = mpjax.search(loss, w, X)
    assert not report.met
    assert report.text().startswith(
        "the gradients of loss are not finite without autocast either: mpjax.find_nonfinite"
    )
    assert "float_function" not in report.text()
    report = mpjax.layerwise_error(mpjax.autocast(loss), w, X)
    assert "not finite in float32 either" in report.text()
    assert "largest own error" not in report.text()


def test_gradients_that_are_all_zero_meet_no_budget_worth_the_name():
    report = mpjax.search(lambda w, x: jnp.mean(jax.nn.relu(x @ w - 1000)), np.eye(32, dtype=np.float32), X)
    assert str(report).startswith("the gradients of <lambda> are all zero without autocast either: mpjax.numerics")


def test_a_module_that_overflows_is_named_and_not_one_that_reads_it():
    def loss(w, x):
        with jax.named_scope("hot"), jax.named_scope("inner"):
            y = (3e3 * x) @ (3e3 * w) / 9e6
        with jax.named_scope("after"):
            return jnp.mean(jnp.tanh(y @ w) ** 2)

    w = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32) / 6
    report = mpjax.search(loss, w, X)
    assert (report.modules[0].name, report.modules[0].score) == ("hot/inner", float("inf"))
    assert report.keep_float32 == ("hot/inner",)
    assert report.met


def test_a_primitive_that_loses_in_several_places_is_one_rule():
    def loss(w, x):
        for i in range(4):
            with jax.named_scope(f"layer_{i}"):
                y = x @ w
                x = jnp.tanh(y) + (300 * y) * (300 * y) / 9e4
        return jnp.mean(x**2)

    w = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32) / 9
    rounded = mpjax.autocast(loss, "mixed_float16", rules=mpjax.Rules(residuals="full"))  # Without it, no product is.
    report = mpjax.search(rounded, w, X, budget=0.02)
    assert (report.keep_float32, report.rules.deny, report.added) == ((), ("mul",), 'deny=["mul"]')
    assert report.half_share == 1.0
    assert report.text().startswith('one rule meets the budget: deny=["mul"]\n')
    assert report.met


def test_a_loop_that_only_its_own_rule_differentiates_is_searched_without_scores():
    @jax.custom_vjp
    def fixed_point(w, x):
        return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w + x)), (0, x))[1]

    fixed_point.defvjp(lambda w, x: (fixed_point(w, x), (w, x)), lambda saved, g: (saved[1].T @ g, g))

    def loss(w, x):
        return jnp.mean(((3e3 * fixed_point(w, x)) @ (3e3 * w)) ** 2) * 1e-10

    w = np.random.default_rng(1).normal(size=(32, 32)).astype(np.float32) / 6
    report = mpjax.search(loss, w, X)
    assert report.met, report.text()
    assert report.error < report.error_before
    assert {row.score for row in report.modules} == {None}


def test_a_loss_scale_that_flushes_gradients_is_no_reason_to_keep_modules():
    rng = np.random.default_rng(0)
    weights, x = rng.normal(size=(3, 8, 8)).astype(np.float32), rng.normal(size=(4, 8)).astype(np.float32)

    def loss(weights, x):
        for i, w in enumerate(weights):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2) * 1e-9

    found = mpjax.search(loss, weights, x, budget=0.01)
    assert (found.met, found.added) == (True, ""), str(found)
    assert f"init_scale=2.0**{np.log2(found.loss_scale):.0f}" in str(found)
    half = jax.grad(lambda w, scale: mpjax.autocast(loss, "mixed_float16")(w, x) * scale)
    for scale, expected in ((2.0**15, found.error_before), (found.loss_scale, found.error)):
        error = measures.relative_error([half(weights, scale) / scale], [jax.grad(loss)(weights, x)])
        assert error == pytest.approx(expected, rel=0.2)
    assert found.error < 0.01 < found.error_before
    assert mpjax.search(loss, weights, x, budget=0.01, loss_scale=2.0**15).loss_scale is None


def test_casts_of_the_code_itself_are_errors_too():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(8, 8)).astype(np.float32), rng.normal(size=(4, 8)).astype(np.float32)

    def loss(w, x, dtype="bfloat16"):
        return jnp.mean(jnp.tanh(x.astype(dtype) @ w.astype(dtype)).astype(np.float32) ** 2)

    found = mpjax.search(loss, w, x, budget=1e-4)
    error = measures.relative_error([jax.grad(loss)(w, x)], [jax.grad(functools.partial(loss, dtype="float32"))(w, x)])
    assert found.error_before == pytest.approx(error, rel=0.5)
    assert not found.met
    assert "casts of the code itself" in str(found)
