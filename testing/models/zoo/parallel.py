"""Programs over several devices: shardings under `jit`, `shard_map` with collectives, `pmap`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .linen import cross_entropy
from .program import dense_params, labelled, program


def mesh() -> Mesh:
    """A mesh of two devices."""
    return Mesh(np.array(jax.devices()[:2]), ("data",))


@program()
def jit_shardings(key):
    """A jit with input and output shardings and a constraint inside, within a jit without shardings."""
    rows, whole = NamedSharding(mesh(), P("data")), NamedSharding(mesh(), P())
    params = dense_params(key, 64, 64, 16)

    @functools.partial(jax.jit, in_shardings=(whole, rows), out_shardings=rows)
    def network(params, x):
        hidden = jax.nn.silu(x @ params[0]["w"] + params[0]["b"])
        hidden = jax.lax.with_sharding_constraint(hidden, rows)
        return hidden @ params[1]["w"] + params[1]["b"]

    @jax.jit
    def loss_fn(params, batch):
        return cross_entropy(network(params, batch[0]), batch[1])

    return loss_fn, params, labelled(key, (256, 64))


@program()
def shard_map_data(key):
    """Data parallel: each device has its rows; `pmean` of the loss and of a statistic."""
    params = dense_params(key, 64, 64, 16)

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    def loss_fn(params, batch):
        hidden = batch[0] @ params[0]["w"] + params[0]["b"]
        hidden = jnp.tanh(hidden - jax.lax.pmean(jnp.mean(hidden, 0), "data"))
        return jax.lax.pmean(cross_entropy(hidden @ params[1]["w"] + params[1]["b"], batch[1]), "data")

    return loss_fn, params, labelled(key, (256, 64))


@program()
def shard_map_tensor(key):
    """Tensor parallel: split hidden units, `psum` of partial products, `all_gather` of activations."""
    params = {"up": dense_params(key, 64, 64)[0], "down": dense_params(key, 64, 64)[0]}
    specs = {"up": {"w": P(None, "data"), "b": P("data")}, "down": {"w": P("data", None), "b": P()}}

    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=(specs, P("data")), out_specs=P("data"))
    def network(params, x):
        x = jax.lax.all_gather(x, "data", tiled=True)
        hidden = jax.nn.silu(x @ params["up"]["w"] + params["up"]["b"])
        out = jax.lax.psum_scatter(hidden @ params["down"]["w"], "data", tiled=True)
        return out + params["down"]["b"]

    def loss_fn(params, x):
        return jnp.mean((network(params, x) - x) ** 2)

    return loss_fn, params, jax.random.normal(key, (256, 64))


@program()
def pmap_replicas(key):
    """`pmap` over replicas with a `pmean` of the loss."""
    params = dense_params(key, 32, 64, 16)

    @functools.partial(jax.pmap, axis_name="replicas", in_axes=(None, 0))
    def replica(params, batch):
        hidden = jax.nn.silu(batch[0] @ params[0]["w"] + params[0]["b"])
        return jax.lax.pmean(cross_entropy(hidden @ params[1]["w"], batch[1]), "replicas")

    def loss_fn(params, batch):
        return replica(params, batch)[0]

    inputs, labels = labelled(key, (256, 32))
    return loss_fn, params, (inputs.reshape(2, 128, 32), labels.reshape(2, 128))
