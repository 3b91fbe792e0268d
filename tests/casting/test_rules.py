"""`mpjax.Rules`: valid entries, precedence and errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax import Rules
from testing import measures

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def model(w, x):
    with jax.named_scope("encoder"):
        x = jnp.abs(x @ w) @ w
    with jax.named_scope("head"):
        return jnp.mean(jnp.abs(x @ w) @ w)


PLACES = np.array([0, 2, 2, 1])


def autocast_half_function(fun):
    return mpjax.autocast(mpjax.half_function(fun))


def dtypes_of(op, rules, fun=model):
    rows = mpjax.explain(mpjax.autocast(fun, rules=rules), W, X).rows
    return [row.dtypes_in[0] for row in rows if row.op == op for _ in range(row.count)]


def test_default_runs_matmuls_and_activations_in_half_and_the_loss_in_float32():
    assert dtypes_of("dot_general", None) == ["float16"] * 4
    assert dtypes_of("abs", None) == ["float16"] * 2
    assert dtypes_of("reduce_sum", None) == ["float32"]


def test_primitive_by_name():
    assert dtypes_of("abs", Rules(deny=["abs"])) == ["float32"] * 2


def test_named_scope_pattern_covers_nested_operations():
    rules = Rules(deny=["*/head"])
    assert dtypes_of("abs", rules) == ["float16", "float32"]
    assert dtypes_of("dot_general", rules) == ["float16", "float16", "float32", "float32"]


def test_named_scope_reaches_into_an_inner_jit():
    def fun(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jax.jit(lambda w, x: x @ w)(w, x) @ w)

    assert dtypes_of("dot_general", Rules(deny=["*/head"]), fun) == ["float32"] * 2


def test_predicate_over_primitive_params_and_avals():
    def small(primitive, params, avals):
        return primitive.name == "dot_general" and avals[1].shape == (8, 1)

    def fun(w, x):
        return jnp.sum(x @ w) + jnp.sum(x @ w[:, :1])

    assert sorted(dtypes_of("dot_general", Rules(deny=[small]), fun)) == ["float16", "float32"]


def test_predicates_precede_patterns_and_patterns_precede_names():
    def absolute(primitive, params, avals):
        return primitive.name == "abs"

    assert dtypes_of("abs", Rules(deny=["abs"], allow=["*/head"])) == ["float32", "float16"]
    assert dtypes_of("abs", Rules(allow=[absolute], deny=["abs"])) == ["float16"] * 2


def test_add_moves_an_entry_to_another_list():
    rules = Rules(deny=["abs", "*/head"]).add(allow=["abs"])
    assert (rules.allow, rules.deny) == (("abs",), ("*/head",))


def test_lists_may_not_overlap():
    with pytest.raises(ValueError, match="'abs' is in both 'allow' and 'deny'"):
        Rules(allow=["abs"], deny=["abs"])


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"deny": ["softmaxx"]}, "'softmaxx' is not a primitive"),
        ({"deny": ["tanhh"]}, "did you mean 'tanh'"),
        ({"deny": "abs"}, "give a list of entries"),
        ({"deny": [3]}, "neither a name"),
        ({"level": "all"}, "level='all'"),
        ({"residuals": "none"}, "residuals='none'"),
    ],
)
def test_invalid_rule_is_an_error_that_quotes_it(lists, message):
    with pytest.raises(ValueError, match=message):
        Rules(**lists)


def test_rule_that_matches_nothing_is_reported():
    with pytest.warns(mpjax.UnusedRuleWarning, match=r"'\*/decoder' matched no operation"):
        mpjax.autocast(model, rules=Rules(deny=["*/decoder"]))(W, X)


def test_level_conservative_keeps_all_but_matmuls_in_float32():
    rules = Rules(level="conservative")
    assert dtypes_of("abs", rules) == ["float32"] * 2
    assert dtypes_of("dot_general", rules) == ["float16"] * 4


def test_level_half_runs_sums_in_half_too():
    assert dtypes_of("reduce_sum", Rules(level="half")) == ["float16"]
    explained = mpjax.explain(mpjax.autocast(model, "O3"), W, X)
    assert {row.dtypes_in[0] for row in explained.rows if row.dtypes_in} == {"float16"}


@pytest.mark.parametrize("everything_in_half", [lambda fun: mpjax.autocast(fun, "O3"), autocast_half_function])
def test_scatters_in_half_combine_halves(everything_in_half):
    """A scatter contains a function of two scalars, traced for float32."""

    def scatters(x):
        x = x @ np.eye(8, dtype=np.float32)
        places = x.at[0].add(x[1]), x.at[0].multiply(x[1]), x.at[0].max(x[1]), jax.ops.segment_sum(x, PLACES, 3)
        return *places, x.at[0].apply(jnp.exp), jax.grad(lambda x: x[PLACES, PLACES].mean())(x)

    x = np.arange(32, dtype=np.float32).reshape(4, 8) / 8
    in_half = everything_in_half(scatters)
    dtypes = {(row.op, row.dtypes_in[0]) for row in mpjax.explain(in_half, x).rows if row.op.startswith("scatter")}
    expected = {(op, "float16") for op in ("scatter-add", "scatter-mul", "scatter-max")}
    assert dtypes == {*expected, ("scatter", "float32")}
    wanted, found = jax.jit(lambda x: (scatters(x), in_half(x)))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3), wanted, found)


def test_override_of_a_policy_is_a_rule():
    policy = "mixed_float16;*/head=>float32"
    rows = mpjax.explain(mpjax.autocast(model, policy), W, X).rows
    assert [row.dtypes_in[0] for row in rows if row.op == "dot_general" for _ in range(row.count)] == [
        "float16",
        "float16",
        "float32",
        "float32",
    ]


def test_environment_adds_to_the_lists(monkeypatch):
    monkeypatch.setenv("MPJAX_DENYLIST_ADD", "abs, */head")
    assert dtypes_of("dot_general", None) == ["float16", "float16", "float32", "float32"]
    assert dtypes_of("abs", None) == ["float32"] * 2


def test_unknown_name_in_the_environment_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("MPJAX_ALLOWLIST_ADD", "matmull")
    with pytest.raises(ValueError, match="MPJAX_ALLOWLIST_ADD: 'matmull'"):
        mpjax.autocast(model)(W, X)


def test_environment_turns_autocast_off(monkeypatch):
    monkeypatch.setenv("MPJAX_AUTOCAST", "0")
    assert measures.half_share(mpjax.autocast(model), W, X) == 0


@pytest.mark.parametrize("residuals", ["half", "full"])
def test_residuals_are_half_only_if_requested(residuals):
    def norm(w, x):
        y = x @ w
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
        return jnp.mean((jax.nn.softmax(y) @ w) ** 2)

    half = measures.residual_bytes(mpjax.autocast(norm, rules=Rules(residuals=residuals)), W, jnp.ones((64, 8)))
    full = measures.residual_bytes(norm, W, jnp.ones((64, 8)))
    assert (half < 0.6 * full) == (residuals == "half")


def gelu(x, labels):
    return jax.nn.gelu(x) @ W


def gate(x, labels):
    return (jax.nn.silu(x) * jnp.abs(x)) @ W


def loss(x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels)


@pytest.mark.parametrize(("after", "activations"), [(gelu, 3), (gate, 3), (loss, 2)])
def test_between_matmuls_only_their_operands_and_results_are_stored(after, activations):
    """A GELU stores no chain of half values, and a loss that picks the labels' logits stores no float32 logits."""
    x, bias, labels = jnp.ones((64, 8)), jnp.ones(8), jnp.zeros(64, jnp.int32)
    model = mpjax.autocast(lambda w, bias, x, labels: jnp.sum(after(x @ w + bias, labels)))
    copy_of_w, indices = 2 * W.size, 2 * labels.nbytes
    assert measures.residual_bytes(model, W, bias, x, labels) <= activations * 2 * x.size + copy_of_w + indices


def test_tanh_is_exact_near_saturation_where_a_matmul_reads_it_too():
    def loss_fn(w, x):
        h = jnp.tanh(x @ w) @ w
        return jnp.sum((h * jnp.tanh(h)) @ w)

    plan = mpjax.explain(loss_fn, W, X)
    assert [row.dtypes_in[0] for row in plan.rows if row.op == "tanh"] == ["float32", "float32"]


def test_a_rule_of_a_line_keeps_what_the_line_computes_in_float32():
    def loss(w, x):
        y = jnp.tanh(x @ w)
        return jnp.sum(y @ w)

    line = loss.__code__.co_firstlineno + 1
    rules = mpjax.Rules(deny=[f"test_rules.py:{line}"])
    w = jnp.eye(8)
    plan = mpjax.explain(mpjax.autocast(loss, rules=rules), w, w)
    dtypes = {row.source: row.dtypes_in[0] for row in plan.rows if row.op == "dot_general"}
    assert dtypes == {f"test_rules.py:{line}": "float32", f"test_rules.py:{line + 1}": "float16"}
    with pytest.warns(mpjax.UnusedRuleWarning, match=r"'other.py:1' matched no operation"):
        mpjax.autocast(loss, rules=mpjax.Rules(deny=["other.py:1"]))(w, w)
