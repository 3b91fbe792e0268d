"""Models of layers that the zoo lacks, in Linen and NNX, for the tests of `with_policy`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx

from testing import cheap_keys
from testing.models.zoo import nnx as nnx_zoo
from testing.models.zoo.linen import MLP, ResNet
from testing.random_programs.evaluate import arrays_in_numpy


class Recurrent(nn.Module):
    make_cell: Callable[[], Any]

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RNN(self.make_cell())(x))


class Layers(nn.Module):
    """The rest of Flax's layers with weights."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), strides=2)(x)
        x = nn.GroupNorm(2)(x)
        x = nn.ConvTranspose(8, (3, 3), strides=(2, 2))(x)
        x = nn.InstanceNorm()(x)
        x = nn.ConvLocal(4, (2, 2), padding="VALID", strides=2)(x)
        x = nn.DenseGeneral((2, 4), axis=(-2, -1))(x)
        x = nn.Einsum((4, 6), "bhij,jk->bhik")(x)
        return nn.WeightNorm(nn.Dense(4))(x)


class HandsDtypeOn(nn.Module):
    """The convention of Flax's examples: a dtype field, float32 by default, passed to every layer."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(nn.Dense(16, dtype=self.dtype)(x))
        return nn.Dense(4, dtype=self.dtype)(nn.relu(x))


def _normal(*shape):
    return lambda: jnp.asarray(np.random.default_rng(7).normal(size=shape), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its input."""

    build: Callable[[], Any]
    inputs: Callable[[], Any]


LINEN = {
    "mlp": Case(MLP, _normal(4, 8)),
    "resnet": Case(ResNet, _normal(4, 8, 8, 3)),
    "lstm": Case(lambda: Recurrent(lambda: nn.LSTMCell(8)), _normal(3, 5, 6)),
    "mgu": Case(lambda: Recurrent(lambda: nn.MGUCell(8)), _normal(3, 5, 6)),
    "simple_cell": Case(lambda: Recurrent(lambda: nn.SimpleCell(8)), _normal(3, 5, 6)),
    "conv_lstm": Case(lambda: nn.RNN(nn.ConvLSTMCell(4, (3, 3))), _normal(2, 3, 4, 4, 2)),
    "bidirectional": Case(lambda: nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.GRUCell(4))), _normal(3, 5, 6)),
    "layers": Case(Layers, _normal(2, 8, 8, 3)),
    "hands_dtype_on": Case(HandsDtypeOn, _normal(8, 8)),
}


class NnxRecurrent(nnx.Module):
    def __init__(self, cell, rngs):
        self.rnn = nnx.RNN(cell, rngs=rngs)
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x))


class NnxLayers(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 8, (3, 3), strides=(2, 2), rngs=rngs)
        self.general = nnx.LinearGeneral((8, 8), (2, 4), axis=(-2, -1), rngs=rngs)
        self.einsum = nnx.Einsum("bhij,jk->bhik", (4, 6), (6,), rngs=rngs)
        self.lora = nnx.LoRA(6, 2, 4, rngs=rngs)

    def __call__(self, x):
        return self.lora(self.einsum(self.general(self.up(self.norm(self.conv(x))))))


def _rngs(seed):
    return nnx.Rngs(cheap_keys.key(seed))


def _nnx_recurrent(make_cell):
    return lambda: NnxRecurrent(make_cell(6, 8, rngs=_rngs(0)), _rngs(1))


NNX = {
    "mlp": Case(lambda: nnx_zoo.MLP(None, _rngs(0)), _normal(4, 64)),
    "lstm": Case(_nnx_recurrent(nnx.LSTMCell), _normal(3, 5, 6)),
    "gru": Case(_nnx_recurrent(nnx.GRUCell), _normal(3, 5, 6)),
    "simple_cell": Case(_nnx_recurrent(nnx.SimpleCell), _normal(3, 5, 6)),
    "layers": Case(lambda: NnxLayers(_rngs(0)), _normal(2, 8, 8, 3)),
}


def of_nnx(build: Callable[[], Any]) -> Any:
    """The NNX module that `build` makes, initialised in NumPy."""
    graphdefs = []

    def state() -> Any:
        graphdef, state = nnx.split(build())
        graphdefs.append(graphdef)
        return state

    made = arrays_in_numpy(state)()
    return nnx.merge(graphdefs[-1], made)
