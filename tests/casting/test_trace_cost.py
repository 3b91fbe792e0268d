"""Repeated layers are differentiated and transposed once, and keep their names."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import ad

import mpjax
from mpjax.casting import cancellation
from mpjax.kernels import weight_gradients
from mpjax.program.source import module_of, path_of
from testing import measures
from testing.random_programs.evaluate import in_numpy


class Block(nn.Module):
    activation: Callable

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(self.activation(nn.Dense(8)(nn.LayerNorm()(x))))


class Net(nn.Module):
    depth: int
    activation: Callable

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = Block(self.activation)(x)
        return jnp.mean(nn.Dense(4)(x) ** 2)


def gradient(depth, activation=nn.gelu):
    model, x = Net(depth, activation), jnp.ones((2, 8))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.make_jaxpr(jax.grad(mpjax.autocast(model.apply)))(params, x)


def regions(jaxpr):
    return [id(e.eqn.params["jaxpr"]) for e in measures.equations(jaxpr) if e.name in ("checkpoint", "remat2")]


def biased_relu(x):
    """A rectifier between a product and a sum, which with it are a region."""
    return nn.relu(x * 1.5) + jnp.tanh(x)


@pytest.mark.parametrize("activation", [nn.gelu, biased_relu])  # JAX makes a rule for each call of a ReLU.
def test_more_equal_layers_make_no_more_programs(activation):
    few, many = regions(gradient(3, activation)), regions(gradient(5, activation))
    assert len(many) == len(few) + 4  # a LayerNorm and an activation in each block
    assert len(set(many)) == len(set(few)) < len(few)


def test_operations_of_a_shared_region_have_the_path_of_their_own_layer():
    paths = []

    def collect(jaxpr, outside):
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            inside = f"{outside}/{module_of(eqn)}".strip("/")
            if eqn.primitive.name == "rsqrt":
                paths.append(path_of(inside))
            if "jaxpr" in eqn.params:
                collect(eqn.params["jaxpr"], inside)

    collect(gradient(3), "")
    for i in range(3):
        # Once forward, once recomputed.
        assert sum(f"Block_{i}" in path for path in paths) == 2, paths


def test_layers_that_differ_do_not_share():
    def loss(scale, w, x):
        for factor in scale:
            x = jax.nn.gelu(x @ w) * factor
        return jnp.sum(jax.nn.log_softmax(x @ w))

    args = (1.0, 2.0, 3.0), np.random.default_rng(0).normal(size=(4, 4)).astype("float32"), np.ones((2, 4), "float32")
    found, expected = (in_numpy(jax.grad(f, 1))(*args) for f in (mpjax.autocast(loss), loss))
    assert measures.relative_error(found, expected) < 5e-3


@pytest.mark.parametrize("differ", ["rule", "function", "nothing"])
def test_functions_with_other_rules_do_not_share(differ):
    def activation(factor):
        slope = factor if differ == "rule" else 1.0
        fun = jax.custom_jvp(lambda x: jnp.tanh(x) * (factor if differ == "function" else 1.0))
        fun.defjvp(lambda primals, tangents: (fun(*primals), tangents[0] * slope))
        return fun

    first = activation(1.0)
    activations = first, (first if differ == "nothing" else activation(3.0))

    def loss(w, x):
        for fun in activations:
            x = fun(jnp.exp(x @ w) * 0.3) + 0.5
        return jnp.sum(jax.nn.log_softmax(x @ w))

    args = np.random.default_rng(0).normal(size=(4, 4)).astype("float32"), np.ones((2, 4), "float32")
    found, expected = (in_numpy(jax.grad(f))(*args) for f in (mpjax.autocast(loss), loss))
    assert measures.relative_error(found, expected) < 5e-3
    shared = regions(jax.make_jaxpr(jax.grad(mpjax.autocast(loss)))(*args))
    assert (len(set(shared)) < len(shared)) == (differ == "nothing")


def test_weight_gradients_are_linearized_without_their_jvp_rule(monkeypatch):
    calls = []
    for primitive in (weight_gradients.detached, weight_gradients.result):
        rule = ad.primitive_jvps[primitive]
        monkeypatch.setitem(ad.primitive_jvps, primitive, lambda *a, r=rule, **k: calls.append(a) or r(*a, **k))
    gradient(1)
    assert not calls


def test_a_derivative_rule_is_traced_when_jax_differentiates():
    traced = []

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        traced.append("forward")
        return product(x, w), (x, w)

    def backward(residuals, ct):
        traced.append("backward")
        x, w = residuals
        return ct @ w.T, x.T @ ct

    product.defvjp(forward, backward)
    loss, x = mpjax.autocast(lambda w, x: jnp.sum(jax.jit(product)(product(x, w), w) ** 2)), jnp.ones((4, 4))
    jax.make_jaxpr(loss)(x, x)
    assert not traced
    gradient = jax.make_jaxpr(jax.grad(loss))(x, x)
    assert sorted(traced) == ["backward", "backward", "forward", "forward"]
    assert measures.half_share_of(gradient) == 1
    traced.clear()
    mpjax.explain(loss, x, x)
    assert len(traced) == 4  # Its report has the rules' operations.


def test_the_constants_of_an_optimizer_are_computed_once(monkeypatch):
    """Each of its additions of an epsilon looked at the norm of all gradients: a GPT's step took 28 s to trace."""
    computed = []
    compute = cancellation.bind_on_host
    monkeypatch.setattr(cancellation, "bind_on_host", lambda eqn, *a, **k: computed.append(1) or compute(eqn, *a, **k))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

    def operations(leaves):
        params, computed[:] = {str(i): jnp.ones((4, 4)) for i in range(leaves)}, []
        grads = jax.grad(lambda p: jnp.sum(functools.reduce(jnp.matmul, p.values())))
        step = lambda params, state: tx.update(grads(params), state, params)
        jax.make_jaxpr(mpjax.autocast(step, "mixed_bfloat16"))(params, tx.init(params))
        return len(computed)

    assert operations(24) < 2.2 * operations(12)


def test_programs_are_forgotten():
    """Plans are kept as long as their programs, which nothing of autocast may keep."""

    def alive():
        jax.clear_caches()
        gc.collect()
        return sum(type(each).__name__ == "Jaxpr" for each in gc.get_objects())

    def plan(factor):
        x = np.ones((4, 4), np.float32)
        jax.make_jaxpr(mpjax.autocast(lambda w, x: jnp.mean(jnp.tanh(x @ w) * factor)))(x, x)

    plan(1.0)
    before = alive()
    for factor in range(2, 12):
        plan(float(factor))
    assert alive() <= before
