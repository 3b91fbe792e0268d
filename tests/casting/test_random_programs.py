"""Properties of autocast on random programs; `python -m testing.fuzz` runs many more of them."""

import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings

from mpjax.casting import classify, infer
from mpjax.casting.lattice import Level
from mpjax.program.primitives import Op
from testing.random_programs import Case, Failure, Rejected, cases, check
from tests.sampling import EVERY

# One shrunk failure is reported at a time: each costs as much as many examples.
_OPTIONS = settings(
    max_examples=200 // EVERY,
    derandomize=True,
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@_OPTIONS
@given(cases())
def test_random_programs(case):
    try:
        check(case)
    except Rejected:
        reject()


def _all_loops(monkeypatch):
    monkeypatch.setitem(classify._SPECIAL, "while", lambda eqn: classify.UNTIL_TOLERANCE)


def _all_matmuls(monkeypatch):
    def in_float32(inference, eqn, listing):
        return inference.in_float32(eqn, listing, Level.FLOAT, "planted")

    monkeypatch.setitem(infer.BY_LIST, Op.ALLOW, in_float32)


@pytest.mark.parametrize(
    ("plant", "result"),
    [
        (_all_loops, "lax.fori_loop(0, n + 1, lambda i, h: jnp.tanh(h @ w), x)"),
        (_all_loops, "lax.while_loop(lambda c: c[1] < 9, lambda c: (jnp.tanh(c[0] @ w), c[1] + 4), (x, s))[0]"),
        (_all_matmuls, "x @ w"),
        (_all_matmuls, "x.astype(jnp.bfloat16).astype(jnp.float32) @ w"),
        (_all_matmuls, "x @ w + lax.custom_linear_solve(lambda v: v * (b @ w).sum(), b, solve_once, solve_once)"),
    ],
)
def test_matmuls_that_stay_float32_without_a_reason_are_caught(monkeypatch, plant, result):
    """Matmuls of loops to a tolerance and of solves, and of operands widened on an explicit mesh, are exempt."""
    program = f"def program(w, x, b, s, n):\n    return {result},\n"
    check(Case(program, "value", "bfloat16", explicit=plant is _all_matmuls))
    plant(monkeypatch)
    with pytest.raises(Failure, match="float32 matmul"):
        check(Case(program + "\n", "value", "bfloat16", explicit=plant is _all_matmuls))


def test_a_rule_in_a_loop_that_closes_over_another_program_is_rejected():
    """JAX documents no such rule. In reverse mode, `jax.jit` removes this one, because nothing reads its result."""
    program = """def program(w, x, b, s, n):
    def step(row, y):
        return row + y, halved_jvp(lambda row: (w @ b, row + s))(row)[1]
    row, unread = lax.scan(step, b, x)
    return row,
"""
    with pytest.raises(Rejected, match="under jit"):
        check(Case(program, "grad", "bfloat16"))


def test_jaxs_derivative_of_a_solve_may_apply_its_operator_in_float32():
    program = """def program(w, x, b, s, n):
    operator = nearly_identity(lambda v: v @ w, b)
    return lax.custom_linear_solve(operator, b, solve_once, solve_once),
"""
    assert check(Case(program, "grad", "float16")) == "checked"


def test_a_program_that_compares_a_value_with_its_rounding_is_judged_in_its_own_dtypes():
    program = """def program(w, x, b, s, n):
    y = jnp.dot(x.astype(jnp.float16), w.astype(jnp.float16)).astype(jnp.float32)
    return jnp.where(y.astype(jnp.bfloat16).astype(jnp.float32) < y, 1.0, y),
"""
    assert check(Case(program, "value", "bfloat16")) == "checked"


def test_a_primitive_that_jax_fails_to_replace_ends_only_the_comparison_of_values():
    """Since JAX 0.12 it lowers this program no further: its callback has no rule for the batch."""
    program = """def program(w, x, b, s, n):
    def fun(y):
        def tanh(x, w):
            return w, jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(y.shape, y.dtype), lax.stop_gradient(y)) + y
        lax.cond(n > 0, strong(lambda x, w: (w, y)), strong(tanh), x, w)
        return b
    return root_near(b, fun),
"""
    check(Case(program, "vmap_of_grad", "float16"))


def test_a_mask_outside_of_a_shard_map_on_explicit_axes_stays_there():
    """A mask moves into the program of its attention, unless its type has the axes of a mesh."""
    program = """def program(w, x, b, s, n):
    def on_each(b, mask):
        return b + (jax.nn.softmax(mask @ mask.T + mask) @ mask)[:1]
    fun = jax.shard_map(on_each, mesh=MESH, in_specs=(P('i'), P()), out_specs=P('i'), check_vma=False)
    return replicated(fun(sharded(jnp.stack([b, b])), replicated(jnp.tril(jnp.ones((3, 3)))))),
"""
    check(Case(program, "value", "float16", rules="fused", explicit=True))


@pytest.mark.parametrize("transform", ["value", "outside_grad", "jvp"])
def test_a_ragged_matmul_inside_auto_axes_is_evaluated(transform):
    program = """def program(w, x, b, s, n):
    def matmul(x, w):
        return lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 1]))
    return jax.sharding.auto_axes(matmul, out_sharding=P())(x, w),
"""
    assert check(Case(program, transform, "float16", explicit=True)) == "checked"


def test_half_gradients_of_float8_matmuls_are_on_widened_operands_on_cpus():
    program = """def program(w, x, b, s, n):
    v = jax.nn.softmax(w @ w.T + jnp.where(jnp.tril(jnp.ones((3, 3), bool)), 0.0, -1e9)) @ w
    return w, v, w
"""
    assert check(Case(program, "grad", "float8", rules="full")) == "checked"
