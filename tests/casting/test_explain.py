"""`mpjax.explain`: the plan that runs, as rows and as text; and its page in the docs."""

from __future__ import annotations

import functools
import json
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from testing import cheap_keys, measures

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "autocast.md"


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(4, name="head")(x)


@pytest.fixture(scope="module")
def program():
    x = jnp.ones((8, 8))
    params = jax.jit(Model().init)(cheap_keys.key(0), x)
    return (lambda params, x: jnp.mean(Model().apply(params, x) ** 2)), params, x


@pytest.fixture(scope="module")
def plan(program):
    return mpjax.explain(*program)


def test_rows_have_module_line_op_flops_dtypes_and_reason(plan):
    matmuls = [row for row in plan.rows if row.op == "dot_general"]
    assert [row.module for row in matmuls] == ["Model/Dense_0", "Model/head"]
    assert [row.flops for row in matmuls] == [2 * 8 * 8 * 16, 2 * 8 * 16 * 4]
    assert all((row.dtypes_in, row.dtypes_out) == (("float16",) * 2, ("float16",)) for row in matmuls)
    assert all(row.why == "allow" for row in matmuls)
    assert all(re.fullmatch(r"\w+\.py:\d+", row.source) for row in matmuls)


def test_the_explained_plan_is_the_one_that_runs(program):
    fun, params, x = program
    cast = mpjax.autocast(fun, "mixed_bfloat16")
    plan = mpjax.explain(cast, params, x)
    assert {row.dtypes_in[0] for row in plan.rows if row.op == "reduce_sum"} == {"float32"}
    ran = {str(e.in_dtypes[0]) for e in measures.equations(jax.make_jaxpr(cast)(params, x)) if e.name == "dot_general"}
    assert ran == set(plan.flops)


def test_shapes_are_accepted_as_arguments(program, plan):
    fun, params, x = program
    shapes = jax.eval_shape(lambda: (params, x))
    assert mpjax.explain(fun, *shapes).rows == plan.rows


def test_loops_count_their_iterations():
    def fun(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=5)[0])

    (row,) = [row for row in mpjax.explain(fun, jnp.ones((8, 8)), jnp.ones((8, 8))).rows if row.op == "dot_general"]
    assert (row.count, row.flops) == (5, 5 * 2 * 8**3)


def test_disabled_regions_are_explained_too():
    def layers(w, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0]

    def fun(w, x):
        with mpjax.autocast_disabled():
            h = layers(w, x)
        return h @ w

    plan = mpjax.explain(fun, jnp.eye(8), jnp.ones((8, 8)))
    assert plan.flops == {"float32": 3 * 2 * 8**3, "float16": 2 * 8**3}
    assert [(row.op, row.count) for row in plan.opaque] == [("dot_general", 3), ("tanh", 3)]
    left = [line for line in str(plan).splitlines() if line.startswith("left as traced")]
    assert len(left) == 1
    assert "dot_general, tanh" in left[0]


def test_a_program_with_disabled_matmuls_warns_that_they_are_kept():
    def fun(w, x):
        with mpjax.autocast_disabled():
            return jax.jit(jnp.dot)(x, w)

    with pytest.warns(mpjax.AutocastWarning, match=r"Left in float32: 1 dot_general \(autocast is disabled here\)"):
        mpjax.autocast(fun)(jnp.eye(8), jnp.ones((8, 8)))


def test_rows_are_json(plan):
    assert json.loads(plan.to_json())["rows"][0]["op"]
    assert plan.to_csv().startswith("module,source,op,")
    assert "<table>" in plan.to_html()


JAX_WRAPPERS = {
    "jit": jax.jit,
    "grad": jax.grad,
    "grad with aux": lambda fun: jax.grad(fun, has_aux=True),
    "value_and_grad of jit": lambda fun: jax.value_and_grad(jax.jit(fun)),
    "checkpoint": jax.checkpoint,
}


@pytest.mark.parametrize("name", JAX_WRAPPERS)
def test_jaxs_wrappers_of_an_autocast_function_are_explained_by_its_plan(name):
    cast = mpjax.autocast(lambda w, x: jnp.sum(jnp.sin(x @ w) @ w), rules=mpjax.Rules(deny=["sin"]))
    args = jnp.eye(8), jnp.ones((4, 8))
    assert mpjax.explain(JAX_WRAPPERS[name](cast), *args).rows == mpjax.explain(cast, *args).rows


def test_a_method_is_explained_by_its_plan():
    class Model:
        @mpjax.autocast
        def loss(self, w):
            return jnp.sum(w @ w)

    plan = mpjax.explain(Model().loss, jnp.eye(8))
    assert [(row.op, row.why) for row in plan.rows] == [("dot_general", "allow"), ("reduce_sum", "deny")]


def test_a_wrapper_of_an_autocast_function_is_explained_with_its_own_code():
    cast = mpjax.autocast(lambda w, x: jnp.sum(x @ w), "mixed_bfloat16")

    @functools.wraps(cast)
    def wrapper(w, x):
        return cast(w, x) + jnp.sum(jnp.tanh(x @ w) @ w)

    w, x = jnp.eye(8), jnp.ones((8, 8))
    for fun in (wrapper, jax.jit(wrapper), jax.grad(wrapper)):
        plan = mpjax.explain(fun, w, x)
        assert plan.flops.keys() == {"bfloat16", "float16"}
        assert "an autocast function inside planned it" in {row.why for row in plan.opaque}


def test_float32_policy_has_no_plan(program):
    fun, params, x = program
    with pytest.raises(ValueError, match="computes in float32"):
        mpjax.explain(mpjax.autocast(fun, "float32"), params, x)


def test_docs_page_shows_what_the_example_prints():
    text = DOCS.read_text()
    code, output = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.S).groups()
    printed: list[str] = []
    # The line numbers of the page are those of the example itself.
    exec(compile(code, "example.py", "exec"), {"print": lambda x: printed.append(str(x))})
    assert [_columns(line) for line in printed[0].splitlines()] == [_columns(line) for line in output.splitlines()]


def _columns(line: str) -> list[str]:
    """The cells of a line without the source line, which is in Flax for Flax's operations."""
    return [cell for cell in re.split(r"\s{2,}", line.strip()) if not re.fullmatch(r"\w+\.py:\d+|[─ ]+", cell)]


def test_rules_that_sum_over_the_axis_of_a_shard_map_are_listed():
    """Such rules can be traced only inside the axes of the mesh."""

    @jax.custom_vjp
    def dense(x, w):
        return x @ w

    dense.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, jax.lax.psum(kept[0].T @ ct, "data")))
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    rows, whole = jax.P("data"), jax.P()
    mapped = jax.shard_map(dense, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    plan = mpjax.explain(mapped, np.ones((4, 8), np.float32), np.ones((8, 8), np.float32))
    in_rules = {(row.op, row.phase): row.count for row in plan.rows if row.rule}
    assert (in_rules["dot_general", "forward"], in_rules["dot_general", "backward"]) == (1, 2)
    assert any(op.startswith("psum") for op, _ in in_rules)


@jax.custom_vjp
def doubled(x):
    return x @ x


doubled.defvjp(lambda x: (x @ x, x), lambda x, ct: (2 * ct @ x,))


def test_forward_and_backward_operations_of_one_line_have_rows_of_their_own():
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda w: jnp.tanh(jnp.tanh(x @ w) @ w))(w) ** 2)

    plan = mpjax.explain(jax.value_and_grad(loss), jnp.eye(8), jnp.eye(8))
    counts: dict[str, int] = {}
    for row in plan.rows:
        counts[row.phase] = counts.get(row.phase, 0) + row.count * (row.op == "dot_general")
    assert counts == {"forward": 2, "recomputed": 2, "backward": 3}
    assert str(plan).split("\n\n")[1].split()[:4] == ["module", "line", "pass", "op"]
    assert "pass" not in str(mpjax.explain(loss, jnp.eye(8), jnp.eye(8))).split("\n\n")[1].split()

    rules = [row for row in mpjax.explain(doubled, jnp.eye(8)).rows if row.op == "dot_general" and row.rule]
    assert [row.phase for row in rules] == ["forward", "backward"]


def test_the_table_folds_rows_that_follow_their_operands_and_repeated_modules():
    def loss_fn(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(2 * (x @ w) + 1) - 0.5
        return jnp.mean(x**2)

    params = [jnp.ones((16, 16))] * 4
    plan = mpjax.explain(mpjax.autocast(loss_fn), params, jnp.ones((8, 16)))
    table = plan.sections()[-1].rows
    assert len(table) == 5 < len(plan.rows) / 3
    folded = [row for row in table if row[0] == "layer_[0-3]"]
    assert [(row[2], row[3], row[4]) for row in folded if row[4]] == [("dot_general", "4", "16.4 kFLOP")]
    assert sum(int(row[3]) for row in table) == sum(row.count for row in plan.rows)
    assert any(", " in row[2] for row in folded)
