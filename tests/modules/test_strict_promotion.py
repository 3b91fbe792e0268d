"""Under `jax_numpy_dtype_promotion="strict"` the layers of Flax run as they do with a `dtype` of their own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from tests.modules.flax_models import LINEN, NNX


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def dtypes_of_gradients(loss, params, x):
    return {g.dtype for g in jax.tree.leaves(jax.eval_shape(jax.grad(loss), params, x))}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    model, x = mpjax.with_policy(LINEN[name].build(), "mixed_float16"), jax.eval_shape(LINEN[name].inputs)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    statistics = jax.tree.map(
        lambda v: jnp.zeros(v.shape, v.dtype), {k: v for k, v in variables.items() if k != "params"}
    )

    def loss(params, x):
        y, _ = model.apply({**statistics, "params": params}, x, mutable=True)
        return y.sum()

    assert dtypes_of_gradients(loss, variables["params"], x) == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    with jax.numpy_dtype_promotion("standard"):  # the models' own initialisers promote
        graphdef, params, rest = nnx.split(mpjax.with_policy(NNX[name].build(), "mixed_float16"), nnx.Param, ...)
    loss = lambda params, x: nnx.merge(graphdef, params, rest, copy=True)(x).sum()
    assert dtypes_of_gradients(loss, params, jax.eval_shape(NNX[name].inputs)) == {jnp.dtype("float32")}


def test_a_models_own_implicit_promotion_is_still_refused():
    class Promotes(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4)(x) + jnp.ones(4)

    with pytest.raises(Exception, match="promotion"):
        mpjax.with_policy(Promotes(), "mixed_float16").init(jax.random.key(0), jnp.ones((2, 4)))
