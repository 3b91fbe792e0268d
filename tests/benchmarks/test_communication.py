"""Communication of sharded steps, at toy size on four devices, and the simulated error of sums over replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import communication
from mpjax.inspection.auditing.communication import collectives
from mpjax.planning.target import TARGETS


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setattr(communication, "WIDTH", 32)
    monkeypatch.setattr(communication, "HIDDEN", 64)
    monkeypatch.setattr(communication, "LAYERS", 2)


def rows(layout, forms):
    (found,) = [communication.measure(4, "float16", (layout,), forms)]
    return {row["form"]: row for row in found}


@pytest.mark.parametrize("layout", ["FSDP", "FSDP, scan"])
def test_parameters_are_gathered_in_half_and_gradients_summed_in_float32(layout, monkeypatch):
    if layout == "FSDP":  # Unrolled layers are alike, but compile one by one.
        monkeypatch.setattr(communication, "LAYERS", 1)
    found = rows(layout, ("float32", "autocast", "with_policy"))
    whole = communication.summary(found["float32"])
    for form in ("autocast", "with_policy"):
        half = communication.summary(found[form])
        assert 0 < half["gathered"] <= 0.55 * whole["gathered"], form
        assert half["other"] == whole["other"] == half["summed in half"] == 0, form
        assert 0 < half["predicates"] <= 3, form
    assert "| FSDP" in communication.table(list(found.values()))


def test_the_gradient_error_on_one_device_is_halfs_rounding():
    assert 1e-4 < communication.gradient_error("by hand", "float16", 1, 4) < 1e-2


@pytest.mark.parametrize(("chip", "pod"), [("v5e", "4x4"), ("v6e", "4x4"), ("v5p", "2x2x4")])
def test_an_explicit_reduce_scatter_is_an_all_reduce_on_a_tpu_pod(chip, pod):
    target = TARGETS[chip]
    devices = target.devices(16, pod)
    if devices is None:
        pytest.skip(target.missing)
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    def gradient(x):
        return jax.lax.psum_scatter(x.T @ x, "data", tiled=True)

    shape = jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=rows)
    text = jax.jit(gradient).trace(shape).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert {row.op for row in collectives(text)} == {"all-reduce"}
