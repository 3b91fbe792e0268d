"""The dtype in which weight gradients are summed across devices, as XLA compiles it for four of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax

W, X = (64, 32), (128, 64)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def sums(policy, spec, mapped=False):
    """Bytes summed across devices by dtype, the loss's four left out; and the dtypes that are gathered."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    w = jax.ShapeDtypeStruct(W, jnp.float32, sharding=NamedSharding(mesh, spec))
    x = jax.ShapeDtypeStruct(X, jnp.float32, sharding=NamedSharding(mesh, P("data")))
    step = jax.grad(mpjax.autocast(loss, policy))
    if mapped:
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    report = mpjax.audit(jax.jit(step), w, x)
    summed = {row.dtype: row.bytes for row in report.communication if row.op == "all-reduce" and row.bytes > 8}
    return summed, {row.dtype for row in report.communication if row.op == "all-gather"}


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("mixed_float16", "float32"),
        ("mixed_bfloat16", "float32"),
        ("p=f32,c=f16,o=f32,r=f16", "float16"),
        # A sum has the dtype of what is summed: no less than float32 here.
        ("p=f32,c=f16,o=f32,r=bf16", "float32"),
    ],
)
def test_weight_gradients_are_summed_in_the_policys_dtype(policy, dtype):
    summed, _ = sums(policy, P())
    assert summed == {dtype: 64 * 32 * jnp.dtype(dtype).itemsize}


def test_parameters_are_gathered_in_half_and_their_gradients_summed_in_float32():
    summed, gathered = sums("mixed_float16", P(None, "data"))
    assert set(summed) <= {"float32"}
    assert gathered <= {"float16"}


def test_the_sum_that_shard_map_inserts_is_float32():
    # It is the transpose of a float32 parameter's broadcast.
    summed, _ = sums("mixed_float16", P(), mapped=True)
    assert set(summed) == {"float32"}
