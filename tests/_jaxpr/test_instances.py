"""Equations belong to instances of modules: by the parameters that they read, in every library."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax

X = jnp.ones((2, 4))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = nnx.relu(block(x))
        return x


class Eqx(eqx.Module):
    first: eqx.nn.Linear
    blocks: list

    def __init__(self):
        self.first = eqx.nn.Linear(4, 4, key=jax.random.key(0))
        self.blocks = [eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(2)]

    def __call__(self, x):
        x = jax.vmap(self.first)(x)
        for block in self.blocks:
            x = jax.nn.relu(jax.vmap(block)(x))
        return x


def plain(params, x):
    for layer in [params["first"], *params["blocks"]]:
        x = jax.nn.relu(x @ layer["w"])
    return x


PLAIN = {"first": {"w": jnp.eye(4)}, "blocks": [{"w": jnp.eye(4)}, {"w": jnp.eye(4)}]}
ROWS = ["first", "blocks/0", "blocks/1"]


@pytest.mark.parametrize(
    ("model", "apply"),
    [(Nnx(nnx.Rngs(0)), Nnx.__call__), (Eqx(), Eqx.__call__), (PLAIN, plain)],
    ids=["nnx", "equinox", "plain"],
)
def test_rows_are_instances_forward_and_backward(model, apply):
    loss = lambda model, x: jnp.sum(apply(model, x) ** 2)
    grads = {Nnx: nnx.grad(loss), Eqx: eqx.filter_grad(loss), dict: jax.jit(jax.grad(loss))}
    matmuls = mpjax.audit(grads[type(model)], model, X).matmuls
    for phase in ("forward", "backward"):
        assert sorted({row.module for row in matmuls if row.phase == phase}) == sorted(ROWS), phase


def test_numerics_names_the_instance_that_overflows():
    model = Eqx()
    hot = eqx.tree_at(lambda m: m.blocks[1].weight, model, jnp.full((4, 4), 1e9))
    report = mpjax.numerics(lambda m, x: jnp.mean(jnp.log1p(m(x) ** 2)), hot, X, verify=False)
    assert report.keep_float32 == ("blocks/1",)
