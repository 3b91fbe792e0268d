"""`mpjax.autocast` on every program of the zoo: properties that hold for all programs.

Most tests only trace; the gradients are computed once for each program.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import pytest

from mpjax import autocast
from testing.zoo import REGISTRY, harness

dtypes = pytest.mark.parametrize("dtype", harness.POLICIES)
differentiable = [name for name, program in REGISTRY.items() if program.differentiable]
# Both dtypes have the same plan and rules. One program of each family shows that bfloat16's arithmetic is right too.
IN_BFLOAT16 = """
    linen_mlp linen_cnn_batchnorm linen_transformer linen_lstm nnx_cnn_batchnorm haiku_attention equinox_recurrent
    dot_product_attention moe_ragged conv_pooling scan_accumulator while_power cond_branches custom_vjp_linear
    checkpoint_policies jit_nested jit_shardings shard_map_data fourier_mixing x64_statistics pure_callback
""".split()
UNDER_EVERY_TRANSFORMATION = """
    linen_cnn_batchnorm linen_transformer_scan_remat nnx_cnn_batchnorm haiku_attention equinox_recurrent
    dot_product_attention scan_accumulator while_power cond_branches custom_vjp_linear custom_jvp_softplus
    checkpoint_policies jit_nested jit_shardings shard_map_data
""".split()
# Loops carry some scalars beside the arrays: a counter, a flag, a loss.
SCALARS = 64


def _transformed():
    """Programs and transformations: each program under a few, each transformation of many programs.

    Both are independent enough that not every pair is a new case. A program meets the transformations in turn, so
    that ones of a kind (those of one library stand together in the registry) meet all of them; the programs that are
    nested themselves meet every one. Random programs try what is left.
    """
    transforms = [transform for transform in harness.TRANSFORMS if transform != "plain"]
    for index, (name, program) in enumerate(REGISTRY.items()):
        taken = [transform for transform in transforms if not harness.refused(program, transform)]
        few = {taken[(index + step) % len(taken)] for step in (0, len(taken) // 2)} if taken else set()
        for dtype in harness.POLICIES:
            yield name, "plain", dtype
        for transform in taken:
            if name in UNDER_EVERY_TRANSFORMATION or transform in few:
                yield name, transform, "float16"


@pytest.mark.parametrize(("name", "transform", "dtype"), _transformed())
def test_matmuls_run_in_half_and_nothing_risky_does(name, transform, dtype):
    found = harness.structure(name, transform, autocast, dtype)
    # One float32 trace serves both dtypes.
    expected = harness.structure(name, transform, harness.identity, "float16")
    assert jax.tree.structure(found.outputs) == jax.tree.structure(expected.outputs)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(found.outputs)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(expected.outputs)
    ]
    # The program itself has nothing in half: what is found is autocast's.
    assert expected.half_share == 0
    assert expected.risky == []
    assert found.half_share == 1.0
    assert found.risky == []


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in REGISTRY), *((name, "bfloat16") for name in IN_BFLOAT16)]
)
def test_gradients_are_as_close_as_rounding_allows(name, dtype):
    # A non-finite gradient makes the error NaN, which is not below anything.
    assert harness.gradient_error(name, autocast, dtype) <= harness.error_limit(name, dtype)


@pytest.mark.parametrize("name", [name for name, program in REGISTRY.items() if program.has_half])
@dtypes
def test_backward_pass_keeps_no_more_than_that_of_handwritten_code(name, dtype):
    kept = harness.residuals(name, autocast, dtype)
    assert kept <= harness.handwritten_residuals(name, dtype) + SCALARS


@dtypes
def test_backward_pass_keeps_at_most_65_percent_of_float32_in_the_median(dtype):
    shares = [
        harness.residuals(name, autocast, dtype) / harness.residuals(name, harness.identity, dtype)
        for name in differentiable
    ]
    assert statistics.median(shares) <= 0.65


@pytest.mark.parametrize("name", [n for n in differentiable if "remat" not in REGISTRY[n].refuses])
def test_casts_of_weights_stay_inside_remat(name):
    kept = harness.residuals(name, autocast, "float16", remat=True)
    assert kept <= harness.residuals(name, harness.identity, "float16", remat=True) + SCALARS


def test_weak_types_of_outputs_stay_weak():
    (found, _), (expected, _) = (
        harness.structure("weak_types", "plain", caster, "float16").outputs for caster in (autocast, harness.identity)
    )
    assert [x.weak_type for x in jax.tree.leaves(found)] == [x.weak_type for x in jax.tree.leaves(expected)]


def test_python_scalars_are_taken_as_arguments():
    loss_fn, params, batch = harness.concrete("weak_types")
    params, batch = {**params, "temperature": 1.5}, {**batch, "scale": 0.5}
    loss, _ = autocast(loss_fn, "mixed_float16")(params, batch)
    assert jnp.allclose(loss, loss_fn(params, batch)[0], rtol=1e-2)
