"""Models of the other two libraries: Haiku and Equinox."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp

from .linen import cross_entropy
from .program import labelled, program, standard_promotion


@program(has_aux=True, context=standard_promotion)
def haiku_batchnorm(key):
    """A convolution, BatchNorm with state, and a linear layer."""

    def network(x):
        x = hk.Conv2D(16, 3)(x)
        x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
        return hk.Linear(16)(x.mean((1, 2)))

    model: Any = hk.without_apply_rng(hk.transform_with_state(network))
    inputs, labels = labelled(key, (16, 8, 8, 8))
    params, state = model.init(key, inputs)

    def loss_fn(params, batch):
        logits, new_state = model.apply(params, batch[2], batch[0])
        return cross_entropy(logits, batch[1]), new_state

    return loss_fn, params, (inputs, labels, state)


@program()
def haiku_attention(key):
    """Attention and LayerNorm, its layers under `hk.remat`."""

    def network(x):
        for _ in range(2):
            attention = hk.MultiHeadAttention(4, 8, w_init=hk.initializers.VarianceScaling())
            norm = hk.LayerNorm(-1, True, True)
            x = x + hk.remat(lambda x, attention=attention, norm=norm: attention(*[norm(x)] * 3))(x)
        return hk.Linear(16)(x)

    model: Any = hk.without_apply_rng(hk.transform(network))
    inputs, labels = labelled(key, (8, 16, 32))

    def loss_fn(params, batch):
        return cross_entropy(model.apply(params, batch[0])[:, -1], batch[1])

    return loss_fn, model.init(key, inputs), (inputs, labels)


@program()
def equinox_mlp(key):
    """An Equinox module as params, without its static parts, vmapped over the batch."""
    model = eqx.nn.MLP(32, 16, 64, 2, jax.nn.silu, key=key)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch[0]), batch[1])

    return loss_fn, params, labelled(key, (256, 32))


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    conv: eqx.nn.Conv1d
    cell: eqx.nn.GRUCell

    def __call__(self, x):
        x = self.conv(jax.vmap(self.norm)(x).T).T

        def step(h, x):
            return self.cell(x, h), None

        return jax.lax.scan(step, jnp.zeros(16), x)[0]


@program()
def equinox_recurrent(key):
    """LayerNorm, a convolution and a GRU cell under a scan, all inside a vmap."""
    block = EquinoxBlock(eqx.nn.LayerNorm(32), eqx.nn.Conv1d(32, 16, 3, key=key), eqx.nn.GRUCell(16, 16, key=key))
    params, static = eqx.partition(block, eqx.is_inexact_array)

    def loss_fn(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch[0]), batch[1])

    return loss_fn, params, labelled(key, (64, 10, 32))
