"""Autocast on functions of NNX modules, whose state changes inside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import measures


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.fixture(scope="module")
def x():
    return jnp.asarray(np.random.default_rng(0).normal(size=(32, 8)), jnp.float32)


@pytest.fixture(scope="module")
def built():
    return nnx.jit(lambda: Model(nnx.Rngs(0)))()


@pytest.fixture
def model(built):
    return nnx.clone(built)


@pytest.fixture
def plain(built):
    return nnx.clone(built)


def test_state_that_changes_inside_changes_outside(model, plain, x):
    mpjax.autocast(loss_fn)(model, x)
    nnx.jit(loss_fn)(plain, x)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-3)
    assert model.norm.mean[...].dtype == jnp.float32
    assert model.drop.rngs.count[...] == plain.drop.rngs.count[...] == 1


@pytest.mark.parametrize("of", [lambda model: model, lambda model: model.__call__])
def test_a_module_or_its_method_may_be_the_function(of, model, plain, x):
    fun = mpjax.autocast(of(model))
    np.testing.assert_allclose(fun(x), nnx.jit(Model.__call__)(plain, x), atol=1e-2)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-3)
    assert "100.0% in half" in str(mpjax.explain(fun, x))
    assert mpjax.audit(of(plain), x).flops.keys() == {"float32"}


def test_value_and_grad_over_an_autocast_function_of_a_module(model, plain, x):
    loss, grads = nnx.jit(nnx.value_and_grad(mpjax.autocast(loss_fn)))(model, x)
    true_loss, true_grads = nnx.jit(nnx.value_and_grad(loss_fn))(plain, x)
    assert measures.relative_error([loss], [true_loss]) < 2e-3
    assert measures.relative_error(grads, true_grads) < 5e-3
    assert jax.tree.structure(grads) == jax.tree.structure(true_grads)
    assert np.any(np.asarray(model.norm.mean[...]))


def test_training_step_under_nnx_jit_runs_in_half(model, x):
    before = np.asarray(model.norm.mean[...])

    @nnx.jit
    def step(model, x):
        loss, grads = nnx.value_and_grad(mpjax.autocast(loss_fn))(model, x)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))
        return loss

    losses = [float(step(model, x)) for _ in range(3)]
    assert np.isfinite(losses).all()
    assert not np.array_equal(before, model.norm.mean[...])
    assert model.first.kernel[...].dtype == jnp.float32


def test_split_and_merge_inside(model, x):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest)
        return loss_fn(model, x), nnx.state(model, nnx.BatchStat)

    gradient = jax.value_and_grad(mpjax.autocast(loss), has_aux=True)
    (_, state), grads = jax.eval_shape(gradient, params, rest, x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((state, grads)))


def test_a_returned_module_is_the_argument_itself(model, x):
    def fun(model, x):
        return model, {"loss": loss_fn(model, x), "name": "kept"}

    out, aux = mpjax.autocast(fun)(model, x)
    assert out is model
    assert aux["name"] == "kept"
