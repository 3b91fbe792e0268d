"""`with_policy` on NNX models: dtypes, accuracy, and the ways in which Flax uses a model."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys
from testing.measures import equations, half_share, matmuls
from testing.models.zoo.nnx import MLP, ConvNet
from testing.random_programs.evaluate import in_numpy
from tests.modules.flax_models import NNX, of_nnx

F16 = jnp.dtype("float16")
KEY = cheap_keys.key(0)


@functools.cache
def built(name):
    return of_nnx(NNX[name].build)


@pytest.mark.parametrize("name", NNX)
def test_every_matmul_of_forward_and_backward_is_half(name):
    x = NNX[name].inputs()
    graphdef, params, rest = nnx.split(mpjax.with_policy(built(name), "mixed_float16"), nnx.Param, ...)

    def total(params):
        y = nnx.merge(graphdef, params, rest, copy=True)(x)
        assert y.dtype == jnp.float32
        return y.sum()

    assert half_share(jax.grad(total), params) == 1.0


def test_statistics_are_float32_and_kept():
    model = mpjax.with_policy(nnx.BatchNorm(4, rngs=nnx.Rngs(KEY)), "p=f32,c=f16")
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32) + 1
    graphdef, state = nnx.split(model)
    program = jax.make_jaxpr(lambda state: nnx.merge(graphdef, state, copy=True)(x))(state)
    sums = [e for e in equations(program) if e.name == "reduce_sum"]
    assert sums
    assert all(e.in_dtypes[0] == jnp.float32 for e in sums)
    assert nnx.jit(lambda model: model(x))(model).dtype == F16
    assert model.mean.dtype == jnp.float32
    np.testing.assert_allclose(model.mean[...], 0.01 * x.mean(0), rtol=1e-3)


def test_an_override_applies_and_one_that_matches_nothing_warns():
    policy = mpjax.Policy("float32", "float16", "float32", [("outer", "float32"), ("over", "float32")])
    with pytest.warns(mpjax.UnusedOverrideWarning, match="over"):
        model = mpjax.with_policy(built("mlp"), policy)
    assert [e.in_dtypes[0] for e in matmuls(model, np.ones((1, 64), np.float32))] == [F16, jnp.float32]


def test_a_layers_own_dtype_takes_precedence():
    layers = lambda rngs: (nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, dtype=jnp.float32, rngs=rngs))
    model = of_nnx(lambda: nnx.Sequential(*layers(nnx.Rngs(KEY))))
    with pytest.warns(mpjax.ExplicitDtypeWarning, match=r"50% .*layers/1 \(float32\)"):
        found = matmuls(mpjax.with_policy(model, "mixed_float16"), np.ones((1, 4), np.float32))
    assert [e.in_dtypes[0] for e in found] == [F16, jnp.float32]


@pytest.mark.parametrize(("policy", "norm"), [("O2", "float32"), ("O3", "float16")])
def test_half_parameters_are_the_float32_ones_rounded(policy, norm):
    net = of_nnx(lambda: ConvNet(None, nnx.Rngs(KEY)))
    state = nnx.state(mpjax.with_policy(net, policy))
    kernel = state["conv"]["kernel"][...]
    np.testing.assert_array_equal(kernel, np.asarray(net.conv.kernel[...]).astype(np.float16))
    assert kernel.dtype == F16
    assert state["norm"]["scale"].dtype == norm
    assert state["norm"]["mean"].dtype == jnp.float32


def test_the_model_is_of_the_same_kind_and_the_given_one_unchanged():
    given = built("mlp")
    model = mpjax.with_policy(given, "mixed_float16")
    x = np.ones((2, 64), np.float32)
    assert isinstance(model, MLP)
    assert isinstance(model.inner, nnx.Linear)
    assert half_share(given, x) == 0.0
    np.testing.assert_array_equal(in_numpy(pickle.loads(pickle.dumps(model)))(x), in_numpy(model)(x))
    again = mpjax.with_policy(mpjax.with_policy(given, "mixed_bfloat16"), "mixed_float16")
    assert nnx.graphdef(again) == nnx.graphdef(model)


def test_a_submodule_keeps_its_own_policy():
    inner, outer = (of_nnx(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(KEY))) for _ in range(2))
    inner = mpjax.with_policy(inner, "mixed_bfloat16")
    model = mpjax.with_policy(nnx.Sequential(inner, outer), "mixed_float16")
    assert [e.in_dtypes[0] for e in matmuls(model, np.ones((1, 4), np.float32))] == [jnp.bfloat16, F16]


def test_attributes_that_a_method_sets_are_kept():
    class Counts(nnx.Module):
        def __init__(self):
            self.calls = 0
            self.seen = nnx.Variable(jnp.zeros(()))

        def __call__(self, x):
            self.calls += 1
            self.seen[...] += 1
            return x

    model = mpjax.with_policy(Counts(), "mixed_float16")
    model(np.ones(2, np.float32))
    model(np.ones(2, np.float32))
    assert (model.calls, float(model.seen[...])) == (2, 2.0)


def test_modules_and_attributes_that_a_method_changes_are_the_callers_own():
    class Grows(nnx.Module):
        def __init__(self, rngs):
            self.layers, self.cache, self.name = nnx.List([nnx.Linear(4, 4, rngs=rngs)]), nnx.data(None), "new"
            self.scratch = nnx.Variable(jnp.zeros(()))

        def grow(self, x):
            self.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
            self.cache, self.name = nnx.Cache(x), "grown"
            del self.scratch
            return self.layers[0], self.layers[1], self.cache, self

    model = mpjax.with_policy(Grows(nnx.Rngs(0)), "mixed_float16")
    first = model.layers[0]
    found = model.grow(jnp.ones((2, 4)))
    assert found[0] is first
    assert found[1] is model.layers[1]
    assert found[2] is model.cache
    assert found[3] is model
    assert (model.name, hasattr(model, "scratch")) == ("grown", False)
    assert half_share(model.layers[1], np.ones((2, 4), np.float32)) == 1.0


class Counted(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, x):
        self.kernel[...] = self.kernel[...] * 2
        return x @ self.kernel[...]


@pytest.mark.parametrize("policy", ["mixed_float16", "O3", "float32"])
def test_a_method_may_assign_to_a_parameter(policy):
    given = of_nnx(lambda: Counted(nnx.Rngs(KEY)))
    model = mpjax.with_policy(given, policy)
    kernel, before = model.kernel, np.asarray(model.kernel[...])
    model(np.ones((1, 4), np.float32))
    assert model.kernel is kernel
    assert kernel.dtype == before.dtype
    np.testing.assert_array_equal(kernel[...], 2 * before)


def test_a_norm_subtracts_its_running_mean_in_float32():
    norm = nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(KEY))
    x = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    norm.mean[...], expected = jnp.full(8, 1000.4), x / np.sqrt(1 + 1e-5)  # the nearest float16 is 1000.5
    found = mpjax.with_policy(norm, "mixed_float16")(x + np.float32(1000.4))
    np.testing.assert_allclose(found, expected, atol=4e-3)
