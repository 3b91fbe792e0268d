"""Programs on a mesh with explicit axes, `jax.make_mesh`'s default, where every array's type contains its sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax

MESH = jax.make_mesh((2, 2), ("data", "model"))


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(MESH):
        yield


def array(seed, spec, *shape):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jax.device_put(values, jax.NamedSharding(MESH, P(*spec)))


def conv(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def in_scan(w, x):
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]


def in_cond(w, x):
    return lax.cond(w[0, 0] > 0, lambda x: x @ w, lambda x: x @ w @ w, x)


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)


def with_auto_axes(w, x):
    """Operations between float32 and half on both sides of the boundary, some recomputed in the backward pass."""
    layer = jax.sharding.auto_axes(lambda x, w: normalised(jax.nn.softmax(x @ w)), out_sharding=P("data"))
    some = jax.sharding.auto_axes(lambda x, w: in_scan(w, x), axes="data", out_sharding=P("data"))
    return normalised(layer(normalised(x @ w), w)) @ w + layer(x, jnp.exp(w)) + some(x, w) @ w


SAMPLES = array(0, ("data",), 8, 16)
SQUARE = array(1, (), 16, 16) / 4
IMAGES = array(2, ("data",), 8, 6, 6, 4)
SEQUENCES = array(3, ("data",), 8, 6, 16)
PROGRAMS = {
    "replicated weight": (lambda w, x: x @ w, SQUARE, SAMPLES),
    "columns over the model axis": (lambda w, x: x @ w, array(4, (None, "model"), 16, 8), SAMPLES),
    "rows over the model axis": (
        lambda w, x: lax.dot_general(x, w, (((1,), (0,)), ((), ())), out_sharding=P("data", None)),
        array(5, ("model", None), 16, 8),
        array(6, ("data", "model"), 8, 16),
    ),
    "weight on the left": (lambda w, x: w @ x.T, SQUARE, SAMPLES),
    "three dimensions": (
        lambda w, x: jnp.einsum("bld,dhk->blhk", x, w),
        array(7, (None, "model"), 16, 4, 8),
        SEQUENCES,
    ),
    "two contracted dimensions": (
        lambda w, x: jnp.einsum("blhk,khd->bld", x, w),
        array(8, (), 8, 4, 16),
        array(9, ("data",), 8, 6, 4, 8),
    ),
    "one weight a head": (
        lambda w, x: jnp.einsum("bhd,hdk->bhk", x, w),
        array(10, (), 4, 16, 8),
        array(11, ("data",), 8, 4, 16),
    ),
    "convolution": (lambda w, x: conv(x, w), array(12, (), 3, 3, 4, 8), IMAGES),
    "pointwise convolution": (lambda w, x: conv(x, w), array(13, (), 1, 1, 4, 8), IMAGES),
    "grouped convolution": (lambda w, x: conv(x, w, feature_group_count=2), array(14, (), 3, 3, 2, 8), IMAGES),
    "vmap": (lambda w, x: jax.vmap(lambda x: x @ w)(x), SQUARE, SEQUENCES),
    "scan": (in_scan, SQUARE, SAMPLES),
    "cond": (in_cond, SQUARE, SAMPLES),
    "auto axes": (with_auto_axes, SQUARE, SAMPLES),
    "remat": (lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w) @ w)(w, x), SQUARE, SAMPLES),
}


def value_and_grad(fun, w, x):
    def loss_fn(w, x):
        return jnp.mean(fun(w, x).astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss_fn, (0, 1)))(w, x)


def assert_close(half, full, dtype):
    assert jax.typeof(half) == jax.typeof(full)  # shape, dtype and sharding
    worst = np.max(np.abs(np.asarray(half) - np.asarray(full)))
    assert worst <= 4 * jnp.finfo(dtype).eps * np.max(np.abs(np.asarray(full)))


# Operands of bfloat16 matmuls are put in order on a CPU, where there are several dimensions.
IN_BFLOAT16 = ("weight on the left", "two contracted dimensions", "one weight a head", "pointwise convolution")


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float16") for name in PROGRAMS), *((name, "bfloat16") for name in IN_BFLOAT16)]
)
def test_values_gradients_and_shardings_are_those_of_float32(name, dtype):
    fun, w, x = PROGRAMS[name]
    half = mpjax.autocast(fun, policy=f"mixed_{dtype}")
    matmuls = [row for row in mpjax.explain(half, w, x).rows if row.op in ("dot_general", "conv_general_dilated")]
    assert matmuls
    assert {row.dtypes_in for row in matmuls} == {(dtype, dtype)}
    jax.tree.map(lambda h, f: assert_close(h, f, dtype), value_and_grad(half, w, x), value_and_grad(fun, w, x))


def test_explicit_axes_inside_an_auto_mesh():
    auto = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    layer = jax.sharding.explicit_axes(lambda x, w: normalised(jax.nn.softmax(x @ w)), in_sharding=(P("data"), P()))
    fun = lambda w, x: normalised(layer(normalised(x @ w), jnp.sin(w))) @ w
    w, x = jax.device_get((SQUARE, SAMPLES))
    with jax.set_mesh(auto):
        full, half = value_and_grad(fun, w, x), value_and_grad(mpjax.autocast(fun), w, x)
        assert mpjax.explain(mpjax.autocast(fun), w, x).half_share == 1.0
    jax.tree.map(lambda h, f: assert_close(h, f, "float16"), half, full)


def test_attention_of_constants_has_the_type_that_the_program_gives_it():
    """JAX puts it on the mesh; a kernel's result is where its operands are, and constants are on none."""
    tokens = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    causal = np.tril(np.ones((3, 3), bool))
    fun = lambda: jax.nn.softmax(jnp.where(causal, jnp.array(tokens) @ tokens.T, -1e30)) @ tokens
    half = mpjax.autocast(fun, rules=mpjax.Rules(attention="fused"))
    with pytest.warns(mpjax.UnusedRuleWarning, match="not on the explicit mesh"):
        found = jax.eval_shape(half)
    assert found.sharding == jax.eval_shape(fun).sharding


@pytest.mark.parametrize(("how", "dtype"), [("autocast", "float16"), ("with_policy", "bfloat16")])
def test_a_sharded_training_step_follows_float32(how, dtype):
    model = nn.Sequential([nn.Dense(32), nn.LayerNorm(), nn.relu, nn.Dense(16)])
    params = model.init(jax.random.key(0), jnp.ones((1, 16)))
    policy = f"mixed_{dtype}"

    def losses(apply, tx):
        def loss_fn(params, x):
            return jnp.mean((apply(params, x).astype(jnp.float32) - x) ** 2)

        @jax.jit
        def step(params, state, x):
            loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x)
            params, state = mpjax.apply_gradients(tx, grads, state, params)
            return params, state, loss

        current, state = params, tx.init(params)
        for _ in range(5):
            current, state, loss = step(current, state, SAMPLES)
            yield float(loss)

    apply = mpjax.autocast(model.apply, policy=policy) if how == "autocast" else mpjax.with_policy(model, policy).apply
    half = list(losses(apply, mpjax.loss_scale_for(optax.adam(1e-2), policy)))
    full = list(losses(model.apply, mpjax.loss_scale_for(optax.adam(1e-2), "float32")))
    np.testing.assert_allclose(half, full, rtol=8 * float(jnp.finfo(dtype).eps))
    assert full[-1] < full[0]
