"""The traversal of programs that plans and audits share, against the one in `testing.measures`."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from mpjax.program.graph import walk
from testing import measures
from testing.models.zoo import REGISTRY, harness


@pytest.mark.parametrize("name", ["linen_cnn_batchnorm", "scan_lstm", "moe_ragged", "jit_nested", "switch_experts"])
def test_flops_are_those_of_an_independent_count(name):
    loss_fn, params, batch = harness.abstract(name)
    program = REGISTRY[name]
    jaxpr = jax.make_jaxpr(jax.grad(loss_fn, has_aux=program.has_aux))(params, batch)
    found = sum(site.flops for site in walk(jaxpr))
    assert found == sum(e.flops for e in measures.equations(jaxpr)) > 0


def test_sites_have_module_and_line_through_jit_and_remat():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.jit(jax.checkpoint(lambda x: jnp.sin(x)))(x)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner(name="inner")(x)

    jaxpr = jax.make_jaxpr(lambda x: Outer().apply({}, x))(jnp.ones(3))
    (site,) = [site for site in walk(jaxpr) if site.name == "sin"]
    assert site.module == "Outer/inner"
    assert site.source.startswith("test_program.py:")
    assert site.inside == ("jit", "remat2")
