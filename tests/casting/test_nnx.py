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


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (32, 8))


def test_state_that_changes_inside_changes_outside(x):
    model, plain = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    mpjax.autocast(loss_fn)(model, x)
    loss_fn(plain, x)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=1e-3)
    assert model.norm.mean[...].dtype == jnp.float32
    assert model.drop.rngs.count[...] == plain.drop.rngs.count[...] == 1


def test_value_and_grad_over_an_autocast_function_of_a_module(x):
    model, plain = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    loss, grads = nnx.value_and_grad(mpjax.autocast(loss_fn))(model, x)
    true_loss, true_grads = nnx.value_and_grad(loss_fn)(plain, x)
    assert measures.relative_error([loss], [true_loss]) < 2e-3
    assert measures.relative_error(grads, true_grads) < 5e-3
    assert jax.tree.structure(grads) == jax.tree.structure(true_grads)
    assert float(jnp.abs(model.norm.mean[...]).sum()) > 0


def test_training_step_under_nnx_jit_runs_in_half(x):
    model = Model(nnx.Rngs(0))
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


def test_split_and_merge_inside(x):
    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x):
        model = nnx.merge(graph, params, rest)
        return loss_fn(model, x), nnx.state(model, nnx.BatchStat)

    (_, state), grads = jax.value_and_grad(mpjax.autocast(loss), has_aux=True)(params, rest, x)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((state, grads)))


def test_module_that_is_returned_is_the_one_that_was_given(x):
    model = Model(nnx.Rngs(0))

    def fun(model, x):
        return model, {"loss": loss_fn(model, x), "name": "kept"}

    out, aux = mpjax.autocast(fun)(model, x)
    assert out is model
    assert aux["name"] == "kept"
