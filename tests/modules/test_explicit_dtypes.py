"""Layers with a `dtype` of their own: they keep it and `with_policy` says so, or the policy takes them over."""

import dataclasses
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.measures import half_share
from testing.random_programs.evaluate import arrays_in_numpy
from tests.modules.flax_models import of_nnx

X = np.ones((2, 8), np.float32)
TAKEN_OVER = dataclasses.replace(mpjax.get_policy("mixed_float16"), override_dtypes=True)


def linen_model():
    class Block(nn.Module):
        dtype: jnp.dtype = jnp.float32  # a default that nobody chose for this model

        @nn.compact
        def __call__(self, x):
            return nn.LayerNorm(dtype=self.dtype)(nn.Dense(24, dtype=self.dtype)(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(Block()(x))

    return Model()


def init(model):
    return jax.eval_shape(model.init, jax.random.key(0), X)


def test_layers_that_stay_float32_are_named_once_with_their_share_of_flops():
    plain = linen_model()
    model = mpjax.with_policy(plain, "mixed_float16")
    with pytest.warns(mpjax.ExplicitDtypeWarning, match=r"50% of the matmul FLOPs stay.*Block_0/Dense_0 \(float32\)"):
        variables = init(model)
    assert half_share(model.apply, variables, X) == 0.5  # and no second warning, which would be an error here
    init(mpjax.with_policy(plain, "mixed_float16"))


def test_counting_flops_for_the_warning_has_no_side_effects():
    calls = []

    class Counts(nn.Module):
        @nn.compact
        def __call__(self, x):
            count = self.variable("state", "count", lambda: jnp.zeros((), jnp.int32))
            count.value += 1
            calls.append(self.scope)
            return nn.Dropout(0.5, deterministic=False)(nn.Dense(4, dtype=jnp.float32)(x))

    model = mpjax.with_policy(Counts(), "mixed_float16")
    rngs = {"params": cheap_keys.key(0), "dropout": cheap_keys.key(1)}
    with pytest.warns(mpjax.ExplicitDtypeWarning, match="100% of the matmul FLOPs"):
        variables = arrays_in_numpy(lambda: model.init(rngs, X))()
    assert variables["state"]["count"] == 1
    assert len(calls) == 2  # the second trace is for the FLOPs in the warning


@pytest.mark.parametrize("policy", [TAKEN_OVER, str(TAKEN_OVER), "p=f32,c=f16,o=f32,override_dtypes=true"])
def test_a_policy_takes_explicit_dtypes_over(policy):
    model = mpjax.with_policy(linen_model(), policy)
    variables = init(model)
    assert half_share(model.apply, variables, X) == 1
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.float32


def test_an_override_takes_explicit_dtypes_over_below_its_path():
    model = mpjax.with_policy(linen_model(), mpjax.Policy("float32", "float16", "float32", [("Block_0", TAKEN_OVER)]))
    assert half_share(model.apply, init(model), X) == 1


def test_a_layer_that_the_policy_keeps_in_float32_does_not_warn():
    model = mpjax.with_policy(linen_model(), mpjax.Policy("float32", "float16", "float32", [("Block_0", "float32")]))
    assert half_share(model.apply, init(model), X) == 0.5


def test_a_norm_with_an_explicit_float32_does_not_warn():
    model = mpjax.with_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm(dtype=jnp.float32)]), "mixed_float16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init(model)


def test_invalid_flag_is_refused():
    with pytest.raises(ValueError, match="override_dtypes='yes'"):
        mpjax.Policy("float32", "float16", "float32", override_dtypes="yes")
    with pytest.raises(ValueError, match="override_dtypes"):
        mpjax.get_policy("p=f32,override_dtypes=maybe")


class NnxModel(nnx.Module):
    def __init__(self, dtype, rngs):
        self.block = nnx.List([nnx.Linear(8, 24, dtype=dtype, rngs=rngs)])
        self.head = nnx.Linear(24, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block[0](x))


def nnx_model(dtype):
    return of_nnx(lambda: NnxModel(dtype, nnx.Rngs(cheap_keys.key(0))))


def test_an_nnx_model_warns_at_its_first_call():
    model = mpjax.with_policy(nnx_model(jnp.float32), "mixed_float16")
    with pytest.warns(mpjax.ExplicitDtypeWarning, match=r"50% of the matmul FLOPs stay.*block/0 \(float32\)"):
        jax.eval_shape(model, X)
    assert half_share(model, X) == 0.5


def test_a_policy_takes_explicit_dtypes_of_nnx_layers_over():
    assert half_share(mpjax.with_policy(nnx_model(jnp.float32), TAKEN_OVER), X) == 1
    half = mpjax.with_policy(nnx_model(jnp.bfloat16), "mixed_float16")  # already half, so no warning
    assert half_share(half, X) == 1
