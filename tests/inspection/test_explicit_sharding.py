"""Inspections of programs on a mesh with explicit axes, `jax.make_mesh`'s default."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpjax

MESH = jax.make_mesh((2, 2), ("data", "model"))


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(MESH):
        yield


def array(seed, spec, *shape):
    return jax.device_put(jax.random.normal(jax.random.key(seed), shape), jax.NamedSharding(MESH, spec))


W, X = array(0, P(None, "model"), 8, 4), array(1, P("data", None), 4, 8)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def mapped(local):
    return jax.shard_map(lambda x: lax.pmean(jnp.mean(local(x)), "data"), in_specs=P("data", None), out_specs=P())


FAULTS = {
    "jit": lambda x: jnp.mean(jnp.log(-jnp.abs(x))),
    "value of each device": mapped(lambda x: jnp.log(-jnp.abs(x))),
    "value that devices share": mapped(lambda x: x + jnp.log(jnp.zeros((2, 8)) - 1)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_operation_that_made_a_nan_is_found(name):
    found = mpjax.find_nonfinite(FAULTS[name], X)
    assert (found.primitive, found.kind, found.element) == ("log", "nan", (0, 0))


def test_numerics_measures_sharded_arrays():
    sharded = mpjax.numerics(loss, W, batches=[X])
    with jax.set_mesh(jax.make_mesh((1,), ("device",))):
        alone = mpjax.numerics(loss, jnp.asarray(jax.device_get(W)), batches=[jnp.asarray(jax.device_get(X))])
    for found, expected in zip(
        sharded.activations + sharded.gradients, alone.activations + alone.gradients, strict=True
    ):
        assert (found.name, found.count, found.zeros) == (expected.name, expected.count, expected.zeros)
        assert found.max == pytest.approx(expected.max, rel=1e-5)


def test_watch_records_sharded_arrays():
    watch = mpjax.watch(mpjax.autocast(loss))
    state = jax.jit(watch.update)(watch.init(W, X), W, X)
    (record,) = state.records()
    assert max(module.amax for module in record.modules) > 0


@pytest.mark.parametrize("tool", ["numerics", "layerwise_error"])
def test_values_of_a_loop_with_auto_axes_are_measured(tool):
    layer = jax.sharding.auto_axes(lambda x: jnp.tanh(x), out_sharding=P("data", None))
    fun = mpjax.autocast(lambda w, x: jnp.mean(lax.scan(lambda x, _: (layer(x), None), x @ w, length=2)[0]))
    w, x = array(0, P(), 8, 4), X
    assert not getattr(mpjax, tool)(fun, w, x).unseen
