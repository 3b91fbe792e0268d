"""The zoo itself: its programs run in float32, and the properties required of autocast can fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from testing import measures
from testing.models.zoo import REGISTRY, evaluated, harness


@pytest.mark.parametrize("name", [name for name, program in REGISTRY.items() if program.has_half])
def test_handwritten_form_has_the_same_params_and_runs_in_half(name):
    program, (_, params, batch) = REGISTRY[name], harness.abstract(name)
    step = jax.value_and_grad(program.handwritten(jnp.dtype("float16")), has_aux=program.has_aux)
    traced, (_, grads) = jax.make_jaxpr(step, return_shape=True)(params, batch)
    # Not 1: the gradient of `jax.nn.dot_product_attention` has a float32 matmul, as has `optax.ctc_loss`.
    assert measures.half_share_of(traced) > 0.85
    _, float32 = harness.structure(name, "plain", harness.identity, "float16").outputs
    assert jax.tree.structure(grads) == jax.tree.structure(float32)


def test_the_measures_catch_a_program_that_is_all_half():
    found = harness.structure("contrastive", "plain", harness.all_half, "float16")
    assert found.half_share == 1.0
    assert any("exp" in risk for risk in found.risky)
    assert any("reduce_sum" in risk for risk in found.risky)


def test_the_measures_catch_gradients_that_are_too_coarse():
    def float8(fun, policy):
        def rounded(x):  # only in value: the cotangents of a scaled loss overflow float8
            return x + jax.lax.stop_gradient(x.astype(jnp.float8_e4m3fn).astype(x.dtype) - x)

        return lambda params, batch: fun(jax.tree.map(rounded, params), batch)

    name = "custom_jvp_softplus"
    assert harness.gradient_error(name, harness.identity, "float16") == 0.0
    for way in (harness, evaluated):
        limit = harness.error_limit(way.rounding_error(name, "float16"), "float16")
        assert way.gradient_error(name, float8, "float16") > limit


def test_wrong_rules_give_other_gradients_than_right_ones():
    errors = [
        measures.relative_error(harness.reference(wrong)[1], harness.reference(right)[1])
        for wrong, right in [
            ("custom_vjp_wrong", "custom_vjp_linear"),
            ("custom_jvp_wrong", "custom_vjp_linear"),
        ]
    ]
    assert min(errors) > 0.3


def test_risky_operations_are_found_in_loops_and_in_the_backward_pass():
    def fun(bias, x):
        return jax.lax.scan(lambda c, x: (c + jnp.exp(x + bias).astype(jnp.float32).sum(), None), 0.0, x)[0]

    args = jnp.ones(4, jnp.float16), jnp.ones((3, 8, 4), jnp.float16)
    assert [e.name for e in measures.risky_in_half(fun, *args)] == ["exp"]
    # The transpose of a broadcast is a sum.
    assert "reduce_sum" in {e.name for e in measures.risky_in_half(jax.grad(fun), *args)}


def test_residuals_are_counted_once_each_and_without_arguments():
    weight, x = np.ones((8, 8), np.float32), np.ones((4, 8), np.float32)

    def fun(weight, x):
        y = jnp.sin(x @ weight)  # Its cosine is kept; weight and x are arguments.
        return jnp.sum(y * y)  # y is kept, twice the same.

    assert measures.residual_bytes(fun, weight, x) == 2 * 4 * 8 * 4
    assert measures.residual_bytes(jax.checkpoint(fun), weight, x) == 0


def test_casts_count_each_step_of_a_loop():
    def fun(x):
        return jax.lax.scan(lambda c, x: (c, x.astype(jnp.float16)), 0, x)[1].astype(jnp.float32)

    assert measures.casts(fun, jnp.ones((5, 2))) == 6


def test_trace_time_ratio_distinguishes_a_long_program_from_a_short_one():
    def long(x):
        for _ in range(100):
            x = jnp.sin(x) + x
        return x

    assert measures.trace_time_ratio(long, jnp.sin, (1.0,)) > 3
