"""Audits show the modules of NNX and Equinox models by path, as they show Linen's."""

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.program import compat
from mpjax.program.graph import walk
from mpjax.program.scopes import named_modules, original_class
from testing import cheap_keys
from tests.modules.flax_models import of_nnx

X = np.ones((2, 8), np.float32)
KEY = cheap_keys.key(0)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    return of_nnx(lambda: Net(nnx.Rngs(KEY)))


class ScannedNet(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.vmap(Block, in_axes=0)(rngs.split(3))

    def __call__(self, x):
        scan = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return scan(self.blocks, x)


def paths(fun, *args):
    return [site.path for site in walk(compat.trace(fun, *args)) if site.flops]


NET = [*(f"Net/blocks/{i}/{layer}" for i in (0, 1) for layer in ("up", "down")), "Net/head"]


def test_a_model_with_a_policy_names_its_modules():
    model = mpjax.with_policy(net(), "mixed_float16")
    assert paths(model, X) == NET
    graphdef, state = nnx.split(model)
    loss = lambda state, x: nnx.merge(graphdef, state, copy=True)(x).sum()
    assert set(paths(jax.grad(loss), state, X)) == set(NET)
    assert [row.module for row in mpjax.audit(loss, state, X).matmuls if row.phase == "forward"] == NET
    assert paths(lambda model, x: model.blocks[1](x), model, X) == ["Block/up", "Block/down"]


def test_a_copy_inside_a_transformation_has_its_classs_name():
    model = mpjax.with_policy(of_nnx(lambda: ScannedNet(nnx.Rngs(KEY))), "mixed_float16")
    graphdef, state = nnx.split(model)
    call = lambda state, x: nnx.merge(graphdef, state, copy=True)(x)
    assert paths(call, state, X) == ["ScannedNet/Block/up", "ScannedNet/Block/down"]


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_named_modules_keep_their_names_in_transformations(transform):
    model = net()
    state = nnx.state(model)
    with named_modules({"args": (model, X)}):
        assert paths(lambda x: transform(lambda model, x: model(x))(nnx.clone(model), x), X)[-1].endswith("Net/head")
    assert type(model) is Net
    assert type(model.blocks[0].up) is nnx.Linear
    assert paths(model, X) == [""] * 5
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(state)


def test_the_class_of_a_module_made_by_a_function_is_known():
    model = net()
    with named_modules((model,)):
        made = nnx.clone(model)
    assert original_class(type(made)) is Net
    assert original_class(Net) is Net


class EqxNet(eqx.Module):
    layers: list
    head: eqx.nn.Linear

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(8, 8, key=key), eqx.nn.MLP(8, 8, 8, 1, key=key)]
        self.head = eqx.nn.Linear(8, 4, key=key)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_equinox_modules_are_named():
    model = eqx.filter_jit(EqxNet)(KEY)
    # Equinox's own layers add a scope with the name of their class.
    linear, mlp = "eqx.nn.Linear", "EqxNet/layers/1/eqx.nn.MLP"
    expected = [f"{path}/{linear}" for path in ("EqxNet/layers/0", f"{mlp}/layers/0", f"{mlp}/layers/1", "EqxNet/head")]
    with named_modules((model,)):
        assert paths(lambda x: jax.vmap(model)(x), X) == expected
        arrays, static = eqx.partition(model, eqx.is_array)
        loss = lambda arrays, x: jax.vmap(eqx.combine(arrays, static))(x).sum()
        assert set(paths(jax.grad(loss), arrays, X)) == set(expected)
    assert type(model) is EqxNet
    assert paths(lambda x: jax.vmap(model)(x), X)[-1] == linear
