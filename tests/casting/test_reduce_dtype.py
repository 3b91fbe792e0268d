"""The dtype in which weight gradients are summed across devices, as XLA compiles it for four of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from testing import measures

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


# The user's own collectives. Their dtypes stand in the jaxpr, so nothing is compiled.
MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def sent(fun, *shapes):
    """The collectives of matrices in a program's jaxpr, with their dtypes."""
    found = measures.equations(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr)
    names = {"psum": "sum", "psum_invariant": "sum", "reduce_scatter": "scatter", "all_gather": "gather"}
    rows = [(names.get(e.eqn.primitive.name), e.eqn.outvars[0].aval) for e in found]
    return {(name, aval.dtype.name) for name, aval in rows if name and aval.ndim == 2}


def gathering_loss(shard, x):
    w = jax.lax.all_gather(shard, "data", tiled=True)
    return jnp.mean(jnp.tanh(x @ w.reshape(W)) ** 2)


@pytest.mark.parametrize(
    ("policy", "gradient"), [("mixed_bfloat16", "float32"), ("p=f32,c=bf16,o=f32,r=bf16", "bfloat16")]
)
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("outside", [False, True])
def test_a_users_gather_is_half_and_the_gradients_scatter_is_not(policy, gradient, checked, outside):
    in_specs = (P("data"), P("data"))
    if outside:  # autocast enters the shard_map
        mapped = jax.shard_map(
            lambda w, x: jax.lax.pmean(gathering_loss(w, x), "data"),
            mesh=MESH, in_specs=in_specs, out_specs=P(), check_vma=checked,
        )  # fmt: skip
        step = jax.grad(mpjax.autocast(mapped, policy))
    else:
        step = jax.shard_map(
            jax.grad(mpjax.autocast(gathering_loss, policy)),
            mesh=MESH, in_specs=in_specs, out_specs=P("data"), check_vma=checked,
        )  # fmt: skip
    assert sent(step, W, X) == {("gather", "bfloat16"), ("scatter", gradient)}


def test_a_gather_that_float32_reads_is_float32():
    def regularised(shard, x):
        w = jax.lax.all_gather(shard, "data", tiled=True)
        return jnp.mean((x @ w) ** 2) + jnp.sum(jnp.exp(w))

    step = jax.shard_map(
        jax.grad(mpjax.autocast(regularised)), mesh=MESH, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    assert sent(step, W, X) == {("gather", "float32"), ("scatter", "float32")}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_gradients_through_a_half_gather_are_right(half):
    def gradient(fun):
        specs = (P("data"), P("data"))
        return jax.jit(jax.shard_map(jax.grad(fun), mesh=MESH, in_specs=specs, out_specs=P("data")))

    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=s).astype(np.float32) / 4 for s in (W, X))
    found, exact = (gradient(f)(w, x) for f in (mpjax.autocast(gathering_loss, f"mixed_{half}"), gathering_loss))
    assert measures.relative_error(found, exact) < 4 * float(jnp.finfo(half).eps)


@pytest.mark.parametrize("form", ["outside", "inside"])
def test_pmap_sums_gradients_in_float32(form):
    def replica(w, x):
        gradient = jax.grad(mpjax.autocast(loss))(w, x) if form == "inside" else jax.grad(loss)(w, x)
        return jax.lax.pmean(gradient, "data")

    def summed(w, x):
        mapped = jax.pmap(replica, axis_name="data", in_axes=(None, 0))
        return mapped(w, x.reshape(4, -1, X[1]))

    step = mpjax.autocast(summed) if form == "outside" else summed
    assert sent(step, W, X) == {("sum", "float32")}
