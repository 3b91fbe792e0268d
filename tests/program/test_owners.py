"""Equations belong to the module instances whose parameters they read, in every library."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from testing import cheap_keys

X = np.ones((2, 4), np.float32)


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
        self.first = eqx.nn.Linear(4, 4, key=cheap_keys.key(0))
        self.blocks = [eqx.nn.Linear(4, 4, key=cheap_keys.key(i)) for i in range(2)]

    def __call__(self, x):
        x = jax.vmap(self.first)(x)
        for block in self.blocks:
            x = jax.nn.relu(jax.vmap(block)(x))
        return x


def plain(params, x):
    for layer in [params["first"], *params["blocks"]]:
        x = jax.nn.relu(x @ layer["w"])
    return x


def plain_params():
    return {
        "first": {"w": np.eye(4, dtype=np.float32)},
        "blocks": [{"w": np.eye(4, dtype=np.float32)} for _ in range(2)],
    }


ROWS = ["first", "blocks/0", "blocks/1"]


@pytest.mark.parametrize(
    ("make", "apply"),
    [(lambda: nnx.jit(Nnx)(nnx.Rngs(cheap_keys.key(0))), Nnx.__call__), (Eqx, Eqx.__call__), (plain_params, plain)],
    ids=["nnx", "equinox", "plain"],
)
def test_rows_are_instances_forward_and_backward(make, apply):
    model = make()
    loss = lambda model, x: jnp.sum(apply(model, x) ** 2)
    grads = {Nnx: nnx.grad(loss), Eqx: eqx.filter_grad(loss), dict: jax.jit(jax.grad(loss))}
    matmuls = mpjax.audit(grads[type(model)], model, X).matmuls
    for phase in ("forward", "backward"):
        assert sorted({row.module for row in matmuls if row.phase == phase}) == sorted(ROWS), phase


def test_numerics_names_the_instance_that_overflows():
    model = Eqx()
    overflowing = eqx.tree_at(lambda m: m.blocks[1].weight, model, np.full((4, 4), 1e9, np.float32))
    report = mpjax.numerics(lambda m, x: jnp.mean(jnp.log1p(m(x) ** 2)), overflowing, X, verify=False)
    assert report.losing == ("blocks/1",)
