"""Each leaf of a result has the type that the function gives it, constants included."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys

X = np.ones((4, 4), np.float32)


def constants(x):
    y = jnp.asarray(x)
    arrays = jnp.array(False), jnp.float32(3), jnp.array(3), jnp.asarray(np.arange(3)), jnp.float16(2), jnp.zeros(2)
    return y @ y, x, arrays, np.float32(2), np.ones(3), 1, True, None


def types(tree):
    return [(type(leaf), jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("x", [X, jnp.asarray(X)], ids=["numpy", "jax"])
def test_constants_are_returned_as_arrays(x):
    assert types(mpjax.autocast(constants)(x)) == types(constants(x))


def test_state_of_an_equinox_norm_is_not_static():
    class Model(eqx.Module):
        linear: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __call__(self, x, state):
            return self.norm(self.linear(x), state)

    def make():
        norm = eqx.nn.BatchNorm(4, axis_name="batch", mode="ema")  # its state has a flag for the first step
        return Model(eqx.nn.Linear(4, 4, key=cheap_keys.key(0)), norm)

    model, state = eqx.nn.make_with_state(make)()
    traces = []

    @eqx.filter_jit
    def step(model, x, state):
        traces.append(state)
        apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return mpjax.autocast(lambda x, state: apply(x, state)[1])(x, state)

    for _ in range(3):
        state = step(model, X, state)
    assert len(traces) == 1


def test_variables_of_an_nnx_module_hold_arrays():
    class Layer(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.first = nnx.BatchStat(jnp.array(True))

        def __call__(self, x):
            self.first.set_value(jnp.array(False))
            self.scale = nnx.Intermediate(jnp.float32(2))
            return self.linear(x)

    layer, expected = Layer(), Layer()
    mpjax.autocast(lambda layer, x: layer(x))(layer, X)
    expected(X)
    assert types(nnx.state(layer)) == types(nnx.state(expected))


@jax.custom_jvp
def with_jvp(x, scale):
    return x @ x * scale, jnp.float32(2)


@jax.custom_vjp
def with_vjp(x, scale):
    return x @ x * scale, jnp.float32(2)


@jax.custom_jvp
def without_matmul(x, scale):
    return x * scale, jnp.float32(2)


@jax.custom_vjp
def of_half(x):
    return x * 3, jnp.float32(2)


with_jvp.defjvp(lambda x, dx: ((x[0] @ x[0], jnp.float32(2)), (dx[0] @ x[0], jnp.float32(0))))
without_matmul.defjvp(lambda x, dx: ((x[0], jnp.float32(2)), (dx[0] * 2, jnp.float32(0))))
with_vjp.defvjp(lambda x, scale: ((x @ x, jnp.float32(2)), x), lambda x, ct: (ct[0] @ x, jnp.float32(3)))
of_half.defvjp(lambda x: ((x * 3, jnp.float32(2)), ()), lambda _, ct: (ct[0] * 3,))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda x: jax.jvp(mpjax.autocast(with_jvp), (x, x[0, 0]), (x, x[0, 0])),
        lambda x: jax.jvp(mpjax.autocast(without_matmul), (x, x[0, 0]), (x, x[0, 0])),
        lambda x: jax.vjp(mpjax.autocast(with_vjp), x, x[0, 0])[0],
        lambda x: jax.vjp(mpjax.autocast(of_half), x.astype(jnp.float16))[0],
        lambda x: jax.grad(lambda scale: mpjax.autocast(with_vjp)(x, scale)[0].sum())(x[0, 0]),
    ],
    ids=["jvp", "jvp without matmul", "forward", "forward of half", "backward"],
)
@pytest.mark.filterwarnings("ignore:autocast")
def test_constants_that_a_rule_returns_are_arrays(derivative):
    assert {type(leaf) for leaf in jax.tree.leaves(derivative(jnp.eye(2)))} == {type(jnp.eye(2))}
