"""The dtype in which weight gradients are summed across devices, as XLA compiles it for four devices."""

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
    """Bytes summed across devices by dtype, without the loss's four; and the dtypes that are gathered."""
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
        # A sum has the dtype of its operand: at least float32 here.
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


# The user's own collectives. Their dtypes are in the jaxpr, so nothing is compiled.
MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def sent(fun, *shapes):
    """The collectives of matrices in a program's jaxpr, with their dtypes."""
    found = measures.equations(jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).jaxpr)
    names = {"psum": "sum", "psum_invariant": "sum", "reduce_scatter": "scatter", "all_gather": "gather"}
    names |= {name: name for name in MOVES}
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


MOVES = {
    "ppermute": lambda w: jax.lax.ppermute(w, "data", [(i, (i + 1) % 4) for i in range(4)]),
    "all_to_all": lambda w: jax.lax.all_to_all(w, "data", 0, 0, tiled=True),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_parameter_is_sent_in_half_and_its_gradient_in_float32(name):
    def moving_loss(w, x):
        return jnp.mean(jnp.tanh(x @ MOVES[name](w)) ** 2)

    step = jax.shard_map(
        jax.grad(mpjax.autocast(moving_loss)),
        mesh=MESH,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    assert sent(step, W, X) == {(name, "float16"), (name, "float32")}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_a_parameter_is_resharded_in_half_and_its_gradient_in_float32(half):
    mesh = jax.make_mesh((4,), ("data",))  # explicit axes

    def resharding_loss(w, x):
        return jnp.mean(jnp.tanh(x @ jax.sharding.reshard(w, P())) ** 2)

    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        w, x = (
            jax.device_put(jnp.asarray(rng.normal(size=s) / 4, jnp.float32), NamedSharding(mesh, spec))
            for s, spec in ((W, P(None, "data")), (X, P("data")))
        )
        gradient = jax.jit(jax.grad(mpjax.autocast(resharding_loss, f"mixed_{half}")))
        found, exact = gradient(w, x), jax.jit(jax.grad(resharding_loss))(w, x)
        moved = {
            e.eqn.outvars[0].aval.dtype.name
            for e in measures.equations(jax.make_jaxpr(gradient)(w, x).jaxpr)
            if e.eqn.primitive.name == "reshard"
        }
    assert moved == {half, "float32"}
    assert found.sharding == exact.sharding
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
