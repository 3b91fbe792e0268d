"""Small models of every kind, in Linen and NNX, for the tests of `with_policy`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from testing import cheap_keys
from testing.measures import half_share_of, relative_error, rounded
from testing.random_programs.evaluate import arrays_in_numpy, as_typed, evaluate, exact


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 16):
            x = nn.tanh(nn.Dense(features)(x))
        return nn.Dense(4)(x)


class ResNetBlock(nn.Module):
    features: int
    train: bool = True

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not self.train)(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not self.train)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), use_bias=False)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3))(x)
        x = ResNetBlock(8, self.train)(x)
        x = ResNetBlock(16, self.train)(x)
        return nn.Dense(4)(x.mean((1, 2)))


class TransformerBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
        h = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class Transformer(nn.Module):
    """Learned and fixed positions, tied output embeddings; set up in `setup`."""

    layers: int = 2

    def setup(self):
        self.embed = nn.Embed(11, 16)
        self.positions = self.param("positions", nn.initializers.normal(0.1), (8, 16))
        self.blocks = [TransformerBlock() for _ in range(self.layers)]
        self.norm = nn.RMSNorm()

    def __call__(self, tokens):
        x = self.encode(tokens)
        return self.embed.attend(x)

    def encode(self, tokens):
        # A float32 constant that the author's code makes, as sinusoids often are.
        fixed = jnp.sin(jnp.arange(tokens.shape[-1], dtype=jnp.float32))[:, None]
        with jax.numpy_dtype_promotion("standard"):  # this model relies on it
            x = self.embed(tokens) + self.positions[: tokens.shape[-1]] + fixed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Recurrent(nn.Module):
    make_cell: Callable[[], Any]

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.RNN(self.make_cell())(x))


class HandWrittenCell(nn.RNNCellBase):
    features: int = 8

    @nn.compact
    def __call__(self, carry, x):
        w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        u = self.param("u", nn.initializers.orthogonal(), (self.features, self.features))
        h = jnp.tanh(x @ w + carry @ u)
        return h, h

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self):
        return 1


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


def _tokens():
    return jnp.asarray(np.random.default_rng(7).integers(11, size=(2, 8)), jnp.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its input."""

    build: Callable[[], Any]
    inputs: Callable[[], Any]


LINEN = {
    "mlp": Case(MLP, _normal(4, 8)),
    "resnet": Case(ResNet, _normal(4, 8, 8, 3)),
    "transformer": Case(Transformer, _tokens),
    "lstm": Case(lambda: Recurrent(lambda: nn.LSTMCell(8)), _normal(3, 5, 6)),
    "gru": Case(lambda: Recurrent(lambda: nn.GRUCell(8)), _normal(3, 5, 6)),
    "mgu": Case(lambda: Recurrent(lambda: nn.MGUCell(8)), _normal(3, 5, 6)),
    "simple_cell": Case(lambda: Recurrent(lambda: nn.SimpleCell(8)), _normal(3, 5, 6)),
    "conv_lstm": Case(lambda: nn.RNN(nn.ConvLSTMCell(4, (3, 3))), _normal(2, 3, 4, 4, 2)),
    "hand_written_cell": Case(lambda: Recurrent(HandWrittenCell), _normal(3, 5, 6)),
    "bidirectional": Case(lambda: nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.GRUCell(4))), _normal(3, 5, 6)),
    "layers": Case(Layers, _normal(2, 8, 8, 3)),
    "hands_dtype_on": Case(HandsDtypeOn, _normal(8, 8)),
}


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in ((8, 16), (16, 16), (16, 4))])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.tanh(layer(x))
        return self.layers[-1](x)


class NnxResNetBlock(nnx.Module):
    def __init__(self, inputs, features, rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.conv1, self.norm1 = conv(inputs, features, (3, 3)), nnx.BatchNorm(features, rngs=rngs)
        self.conv2, self.norm2 = conv(features, features, (3, 3)), nnx.BatchNorm(features, rngs=rngs)
        self.shortcut = conv(inputs, features, (1, 1))

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class NnxResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.block1, self.block2 = NnxResNetBlock(8, 8, rngs), NnxResNetBlock(8, 16, rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block2(self.block1(self.stem(x))).mean((1, 2)))


class NnxTransformerBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 16, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (8, 16)))
        self.blocks = nnx.List([NnxTransformerBlock(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(16, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.encode(tokens))

    def encode(self, tokens):
        fixed = jnp.sin(jnp.arange(tokens.shape[-1], dtype=jnp.float32))[:, None]
        with jax.numpy_dtype_promotion("standard"):  # this model relies on it
            x = self.embed(tokens) + self.positions[: tokens.shape[-1]] + fixed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


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
    "mlp": Case(lambda: NnxMLP(_rngs(0)), _normal(4, 8)),
    "resnet": Case(lambda: NnxResNet(_rngs(0)), _normal(4, 8, 8, 3)),
    "transformer": Case(lambda: NnxTransformer(_rngs(0)), _tokens),
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


def check_gradients(plain: Callable[..., Any], mixed: Callable[..., Any], half: str, *args: Any) -> None:
    """All matmuls of a policy's loss are half; its gradients are float32, and nearly as close to float64's as
    gradients of rounded arguments.

    Args:
        plain: The loss of the float32 model.
        mixed: That of the model under the policy.
        half: The policy's half dtype.
        args: `(params, x, target)`; gradients are those of the params.
    """
    args = (*args[:-1], np.asarray(args[-1], np.float32))
    full, cast = (jax.make_jaxpr(jax.value_and_grad(loss))(*args) for loss in (plain, mixed))
    assert half_share_of(cast) == 1
    assert {aval.dtype for aval in cast.out_avals} == {jnp.dtype("float32")}

    def gradients(jaxpr: Any, store: Any, *args: Any) -> Any:
        return evaluate(jaxpr, jax.tree.leaves(args), store)[1:]

    reference = gradients(full, exact, *args)
    by_rounding = gradients(full, exact, *rounded(args[:-1], half), args[-1])
    found = gradients(cast, as_typed, *args)
    assert relative_error(found, reference) <= 3 * relative_error(by_rounding, reference)
