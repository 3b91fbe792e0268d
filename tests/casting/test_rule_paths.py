"""Rules match the paths that reports print, under every transformation and for every library."""

import warnings

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys

X = np.ones((4, 8), np.float32)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(jnp.tanh(nn.Dense(8, name="gate")(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.gate, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.gate(x)))


class Eqx(eqx.Module):
    gate: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key):
        self.gate, self.head = eqx.nn.Linear(8, 8, key=key), eqx.nn.Linear(8, 8, key=key)

    def __call__(self, x):
        return self.head(jnp.tanh(self.gate(x)))


def linen():
    model = Linen()
    return {"params": {name: {"kernel": np.eye(8, dtype=np.float32), "bias": X[0]} for name in ("gate", "head")}}, (
        lambda params, x: model.apply(params, x)
    )


def plain():
    params = {name: {"w": np.eye(8, dtype=np.float32)} for name in ("gate", "head")}
    return params, lambda params, x: jnp.tanh(x @ params["gate"]["w"]) @ params["head"]["w"]


MODELS = {
    "linen": linen,
    "nnx": lambda: (nnx.jit(Nnx)(nnx.Rngs(cheap_keys.key(0))), Nnx.__call__),
    "equinox": lambda: (Eqx(cheap_keys.key(0)), Eqx.__call__),
    "plain": plain,
}


def loss_of(apply):
    return lambda model, x: jnp.mean(jax.vmap(lambda row: apply(model, row))(x) ** 2)


def matmuls(loss, model, rules):
    with warnings.catch_warnings():
        warnings.simplefilter("error", mpjax.UnusedRuleWarning)
        warnings.simplefilter("ignore", mpjax.AutocastWarning)
        plan = mpjax.explain(mpjax.autocast(loss, rules=rules), model, X)
        jax.eval_shape(lambda x: mpjax.autocast(loss, rules=rules)(model, x), X)
    return [row.dtypes_in[0] for row in plan.rows if row.op == "dot_general"]


@pytest.mark.parametrize("name", MODELS)
def test_every_path_of_a_report_is_a_rule_that_matches(name):
    model, apply = MODELS[name]()
    loss = loss_of(apply)
    printed = {
        "explain": [row.module for row in mpjax.explain(loss, model, X).rows if row.op == "dot_general"],
        "audit": [row.module for row in mpjax.audit(mpjax.autocast(loss), model, X).matmuls],
        "layerwise_error": [row.path for row in mpjax.layerwise_error(mpjax.autocast(loss), model, X).modules],
        "search": mpjax.search(loss, model, X, budget=0.0).keep_float32,
    }
    assert not any("(" in path for paths in printed.values() for path in paths)
    for report, paths in printed.items():
        for path in filter(None, paths):
            rule = path if ":" in path else f"*/{path}"  # a line, of code without a name
            assert "float32" in matmuls(loss, model, mpjax.Rules(deny=[rule])), (report, path)


@pytest.mark.parametrize("name", ["linen", "equinox", "plain"])
def test_numerics_prints_overrides_that_match(name):
    model, apply = MODELS[name]()
    loss = loss_of(lambda model, x: 1e9 * apply(model, x))
    report = mpjax.numerics(loss, jax.tree.map(lambda x: 1e6 * x if eqx.is_array(x) else x, model), X, verify=False)
    assert report.losing
    for path in report.losing:
        assert "float32" in matmuls(loss, model, mpjax.Rules(deny=[f"*/{path}"])), path


def test_a_scope_of_einsum_is_no_module():
    """It is named after its subscripts: a rule may name it, a report shows the module."""
    einsum = lambda p, x: jnp.einsum("bi,io->bo", x, p["head"]["w"])
    params = {"head": {"w": np.eye(8, dtype=np.float32)}}

    def matmul(rules):
        report = mpjax.explain(mpjax.autocast(named, "mixed_float16", rules=mpjax.Rules(**rules)), params, X)
        return next((row.module, row.dtypes_in[0]) for row in report.rows if row.op == "dot_general")

    for scope, module in ((None, "head"), ("Net", "Net")):
        named = einsum if scope is None else jax.named_scope(scope)(einsum)
        for pattern in (f"*/{module}", "*bi,io->bo"):
            assert matmul({}) == (module, "float16")
            assert matmul({"deny": [pattern]}) == (module, "float32")


def test_rules_match_forward_and_backward_and_recomputed_operations():
    @jax.checkpoint
    def gated(w, x):
        with jax.named_scope("gate"):
            return jnp.tanh(x @ w)

    def loss(w, x):
        return jnp.mean((gated(w, x) @ w) ** 2)

    def step(w, x):
        return jax.vmap(jax.grad(loss), (None, 0))(w, x)

    w, x = np.eye(8, dtype=np.float32), np.ones((2, 4, 8), np.float32)
    plan = mpjax.explain(mpjax.autocast(step, rules=mpjax.Rules(deny=["*/gate"])), w, x)
    kinds = {row.dtypes_in[0]: set() for row in plan.rows if row.op == "dot_general"}
    for row in plan.rows:
        if row.op == "dot_general":
            kinds[row.dtypes_in[0]].add(row.module)
    assert kinds == {"float32": {"gate"}, "float16": {""}}
