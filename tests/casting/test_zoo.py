"""`mpjax.autocast` on every program of the zoo: properties that hold for all programs.

Most tests only trace, and most of these share the trace of the plain program. NumPy evaluates most gradients,
because compilation for the CPU takes ten times as long.
"""

from __future__ import annotations

import functools
import statistics

import jax
import numpy as np
import pytest

from mpjax import Float8, Rules, autocast
from mpjax.program import compat
from testing import measures
from testing.models.zoo import REGISTRY, evaluated, harness
from testing.random_programs.evaluate import in_numpy

# One program of each family is also compiled: XLA runs the rewritten program.
COMPILED = """
    linen_cnn_batchnorm dot_product_attention scan_accumulator while_power cond_branches custom_vjp_linear
    checkpoint_policies jit_shardings shard_map_data
""".split()
COMPILED_IN_BFLOAT16 = "dot_product_attention cond_branches custom_vjp_linear shard_map_data".split()
# NumPy evaluates the other programs (`evaluated`) except these.
BEYOND_NUMPY = "shard_map_tensor pmap_replicas pure_callback io_effects debug_effects x64_statistics".split()
# Transformations whose results are those of the plain program, or of another transformation.
SAME_RESULTS = {"scan_inside": "scan"} | dict.fromkeys(
    ("jit", "grad_of_jit", "remat", "jit_inside", "remat_inside", "grad_inside"), "plain"
)
# One of each kind of layer, with and without Flax.
LAYERS = """
    linen_mlp linen_cnn_batchnorm linen_transformer haiku_attention equinox_recurrent scan_lstm nnx_scanned_attention
    dot_product_attention embedding_tied moe_ragged conv_pooling contrastive cond_branches
    checkpoint_policies jit_nested
""".split()
# Convolutions only, and one that needs two devices to trace.
WITHOUT_FLOAT8 = "linen_unet conv_pooling pmap_replicas".split()
# Loops carry some scalars in addition to arrays: a counter, a flag, a loss.
SCALARS = 64


def float8(fun, policy):
    """The caster of "mixed_float8", for matmuls of all sizes and in all places."""
    return autocast(fun, "mixed_float8", rules=Rules(float8=Float8(allow=("*",))))


def mxfp8(fun, policy):
    """The same of "mixed_mxfp8"."""
    return autocast(fun, "mixed_mxfp8", rules=Rules(float8=Float8(allow=("*",))))


def _transformed():
    """Programs and transformations: each program under a few, each transformation of many programs.

    Programs and transformations are mostly independent, so not every pair is a new case. Programs take the
    transformations in turn, so that neighbours in the registry, such as those of one library, get different ones.
    Random programs cover other pairs.
    """
    transforms = [transform for transform in harness.TRANSFORMS if transform != "plain"]
    for index, (name, program) in enumerate(REGISTRY.items()):
        supported = [transform for transform in transforms if not harness.refused(program, transform)]
        yield name, "plain"
        yield name, supported[index % len(supported)]


@pytest.mark.parametrize(("name", "transform"), list(_transformed()))
def test_matmuls_run_in_half_and_nothing_risky_does(name, transform):
    found = harness.structure(name, transform, autocast, "float16")
    expected = harness.structure(name, SAME_RESULTS.get(transform, transform), harness.identity, "float16")
    assert jax.tree.structure(found.outputs) == jax.tree.structure(expected.outputs)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(found.outputs)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(expected.outputs)
    ]
    # The program itself has nothing in half, so any finding is autocast's.
    assert expected.half_share == 0
    assert expected.risky == []
    assert found.half_share == 1.0
    assert found.risky == []


@pytest.mark.parametrize("name", sorted({*COMPILED, *LAYERS}))
def test_both_half_dtypes_have_one_plan(name, monkeypatch):
    monkeypatch.setattr(compat, "contracts_rows", lambda dtype: False)  # only on the CPU, for bfloat16
    found, expected = (harness.structure(name, "plain", autocast, dtype) for dtype in ("bfloat16", "float16"))
    assert found.plan == expected.plan
    assert found.half_share == 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in BEYOND_NUMPY])
def test_gradients_are_as_close_as_careful_casts_by_hand(name, dtype):
    # A non-finite gradient makes the error NaN, which is not below anything.
    assert evaluated.gradient_error(name, autocast, dtype) <= 2.0 * evaluated.error_by_hand(name, dtype)


@pytest.mark.filterwarnings("ignore:autocast. cpu is not known to")
@pytest.mark.parametrize("float8", [float8, mxfp8])
@pytest.mark.parametrize("name", [name for name in REGISTRY if name not in WITHOUT_FLOAT8])
def test_float8_matmuls_of_all_programs(name, float8):
    found, expected = (harness.structure(name, "plain", caster, "bfloat16") for caster in (float8, harness.identity))
    assert jax.tree.leaves(found.outputs) == jax.tree.leaves(expected.outputs)
    assert found.half_share == 1.0
    assert found.risky == []
    matmuls = measures.matmuls_of(harness.plain(name, float8, "bfloat16")[0])
    assert any(measures.FLOAT8.issuperset(matmul.in_dtypes) for matmul in matmuls)
    if name not in BEYOND_NUMPY:
        limit = harness.error_limit(evaluated.rounding_error(name, "float8_e4m3fn"), "float8_e4m3fn")
        assert evaluated.gradient_error(name, float8, "bfloat16") <= limit


@pytest.mark.filterwarnings("ignore:.*keeps nothing of this program in eight bits")
@pytest.mark.parametrize("residuals", ["int8", "float8"])
@pytest.mark.parametrize("name", [*LAYERS, "equinox_mlp", "straight_through", "map_over_heads", "switch_experts"])
def test_gradients_from_residuals_in_eight_bits(name, residuals):
    """With four bits of mantissa for all elements, float8 had up to 3.6 times the error of by hand."""
    cast = functools.partial(autocast, rules=Rules(residuals=residuals))
    assert evaluated.gradient_error(name, cast, "bfloat16") <= 2.5 * evaluated.error_by_hand(name, "bfloat16")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float16") for name in (*COMPILED, *BEYOND_NUMPY)),
        *((name, "bfloat16") for name in COMPILED_IN_BFLOAT16),
    ],
)
def test_compiled_gradients_are_as_close_as_rounding_allows(name, dtype):
    # NumPy evaluates the float32 program if possible; only the rewritten program is compiled.
    rounding = (harness if name in BEYOND_NUMPY else evaluated).rounding_error(name, dtype)
    exact = None if name in BEYOND_NUMPY else evaluated.reference(name)
    assert harness.gradient_error(name, autocast, dtype, exact) <= harness.error_limit(rounding, dtype)


@pytest.mark.parametrize("name", [name for name, program in REGISTRY.items() if program.has_half])
def test_backward_pass_stores_no_more_than_handwritten_code(name):
    assert harness.residuals(name, autocast, "float16") <= harness.handwritten_residuals(name, "float16") + SCALARS


def test_backward_pass_stores_at_most_65_percent_of_float32_in_the_median():
    shares = [
        harness.residuals(name, autocast, "float16") / harness.residuals(name, harness.identity, "float16")
        for name in LAYERS
    ]
    assert statistics.median(shares) <= 0.65


@pytest.mark.parametrize("name", [name for name in LAYERS if "remat" not in REGISTRY[name].refuses])
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
    loss, expected = (in_numpy(fun)(params, batch)[0] for fun in (autocast(loss_fn, "mixed_float16"), loss_fn))
    np.testing.assert_allclose(loss, expected, rtol=1e-2)
