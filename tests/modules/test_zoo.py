"""`with_policy` on the Flax models of the zoo: matmuls are half, gradients near those of float32."""

from __future__ import annotations

import jax
import pytest

import mpjax
from testing.models.zoo import REGISTRY, evaluated, harness


@pytest.mark.parametrize("name", [name for name, program in REGISTRY.items() if program.flax])
def test_matmuls_are_half_and_gradients_as_near_as_rounding_allows(name):
    def by_module(fun, policy):
        return REGISTRY[name].adapted(lambda model: mpjax.with_policy(model, policy))

    found, expected = (harness.structure(name, "plain", caster, "float16") for caster in (by_module, harness.identity))
    assert jax.tree.leaves(found.outputs) == jax.tree.leaves(expected.outputs)
    in_the_loss = 0.0051 if name == "linen_gru_ctc" else 0.0  # CTC has a matmul of its own
    assert found.half_share >= 1.0 - in_the_loss
    limit = harness.error_limit(evaluated.rounding_error(name, "float16"), "float16")
    assert evaluated.gradient_error(name, by_module, "float16") <= limit
