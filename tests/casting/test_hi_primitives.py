"""JAX's upcoming implementations of higher-order primitives are entered as the present ones; what is not is named."""

from __future__ import annotations

import contextlib
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from testing import measures

FLAGS = ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_scan3")
W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) * 0.3, jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)), jnp.float32)
with_generic_batching = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="a new option of JAX 0.12")


@contextlib.contextmanager
def enabled(flag):
    if not hasattr(jax.config, flag):
        pytest.skip(f"this JAX has no {flag}")
    jax.config.update(flag, True)
    try:
        yield
    finally:
        jax.config.update(flag, False)


def product(**options):
    """A matmul with a derivative rule that calls the function itself, as most do."""

    @jax.custom_vjp
    def f(x, w):
        return jnp.tanh(x @ w)

    def bwd(residuals, ct):
        x, w, y = residuals
        g = ct * (1 - y**2)
        return g @ w.T, x.T @ g

    def fwd(x, w):
        y = f(x, w)
        return y, (x, w, y)

    f.defvjp(fwd, bwd, **options)
    return f


@jax.custom_jvp
def scaled_product(x, w):
    return x @ w * 0.5


@scaled_product.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return scaled_product(x, w), (dx @ w + x @ dw) * 0.5


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.gelu(nn.Dense(8)(x)))


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.remat(Block)()(x)
        return jnp.mean(x**2)


def scanned(w, x):
    return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=3)[0] ** 2)


def in_remat(w, x):
    block = jax.checkpoint(lambda x: jnp.tanh(scaled_product(x, w)), policy=jax.checkpoint_policies.dots_saveable)
    return jnp.mean(block(block(x)) ** 2)


def in_vjp(w, x):
    f = product()
    return jnp.mean(jax.lax.scan(lambda h, _: (f(h, w), None), x, None, length=2)[0] ** 2)


def root(w, x, summed=lambda y: y):
    def residual(y):
        return summed(y @ w.T @ w) + 3 * y - x

    def solve(f, guess):
        return jax.lax.fori_loop(0, 12, lambda _, y: y - 0.2 * f(y), guess)

    found = jax.lax.custom_root(residual, jnp.zeros_like(x), solve, lambda g, y: solve(lambda z: g(z) - y, y * 0.0))
    return jnp.mean((found @ w) ** 2)


@pytest.mark.filterwarnings("ignore:autocast. Not entered. _RootLinearMap")
@pytest.mark.parametrize("explicit", [False, True])
def test_a_root_on_several_devices_is_entered(explicit):
    """Its rules are traced where its collectives have their axes."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("i",), axis_types=(kind,), devices=jax.devices()[:2])

    def on_device(w, x):
        return jax.lax.pmean(root(w, x, lambda y: jax.lax.pmean(y, "i")), "i")

    def sharded(w, x):
        return jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(w, x)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("i")))
        w = jax.device_put(W, NamedSharding(mesh, P()))
        rows = mpjax.explain(mpjax.autocast(sharded), w, x).rows
        assert {row.dtypes_in for row in rows if row.op == "dot_general"} == {("float16", "float16")}
        assert any(row.op == "dot_general" and not row.rule and row.count > 1 for row in rows)
        gradient = jax.jit(jax.grad(mpjax.autocast(sharded)))(w, x)
        assert measures.relative_error(gradient, jax.jit(jax.grad(sharded))(w, x)) < 2e-2


PROGRAMS = {"scan": scanned, "remat": in_remat, "custom_vjp": in_vjp, "custom_root": root}


def flops(gradient, *args):
    return mpjax.audit(gradient, *args).flops


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_cast_under_each_flag_as_without(name, flag):
    loss = PROGRAMS[name]
    expected, plain = flops(jax.grad(mpjax.autocast(loss)), W, X), jax.grad(loss)(W, X)
    with enabled(flag):
        gradient = jax.grad(mpjax.autocast(lambda w, x: loss(w, x)))  # JAX has cached the other one's trace
        assert flops(gradient, W, X) == expected
        assert measures.relative_error(gradient(W, X), plain) < 2e-3
        assert "call_hi_primitive" not in str(jax.make_jaxpr(mpjax.autocast(lambda w, x: loss(w, x)))(W, X))


@pytest.mark.parametrize("flag", FLAGS)
def test_rematerialised_layers_are_in_half_under_each_flag(flag):
    model = Blocks()
    params = model.init(jax.random.key(0), X)
    with enabled(flag):
        report = mpjax.audit(jax.grad(mpjax.autocast(model.apply)), params, X)
        assert report.half_share == 1.0
        assert "recomputed" in {row.phase for row in report.matmuls}


@pytest.mark.parametrize(
    "outer", [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, (None, 0))], ids=["jit", "remat", "vmap"]
)
@pytest.mark.parametrize("flag", FLAGS[:3])
def test_an_autocast_function_is_transformed_under_each_flag(flag, outer):
    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean(outer(mpjax.autocast(in_remat))(w, x)))(w)

    x = X[:, None] if outer is not jax.jit and outer is not jax.checkpoint else X
    expected = gradient(W, x)
    with enabled(flag):
        np.testing.assert_allclose(gradient(W, x), expected, rtol=1e-6)


@with_generic_batching
@pytest.mark.parametrize("symbolic_zeros", [False, True])
def test_a_rule_with_generic_batching_is_entered(symbolic_zeros):
    def loss(f):
        return lambda w, x: jnp.mean(f(f(x, w), w) ** 2)

    if symbolic_zeros:

        def with_zeros(**options):
            f = jax.custom_vjp(lambda x, w: jnp.tanh(x @ w))

            def fwd(x, w):
                assert w.perturbed
                y = f(x.value, w.value)
                return y, (x.value, w.value, y)

            def bwd(residuals, ct):
                x, w, y = residuals
                g = ct * (1 - y**2)
                return g @ w.T, x.T @ g

            f.defvjp(fwd, bwd, symbolic_zeros=True, **options)
            return f

        make = with_zeros
    else:
        make = product
    before, after = loss(make()), loss(make(generic_batching=True))
    mapped = [lambda w, x, f=f: jnp.mean(jax.vmap(lambda row: f(w, row[None]))(x)) for f in (before, after)]
    looped = [
        lambda w, x, f=f: jax.lax.scan(lambda total, row: (total + f(w, row[None]), None), 0.0, x)[0]
        for f in (before, after)
    ]
    for old, new in ((before, after), mapped, looped):
        gradient = jax.grad(mpjax.autocast(new))
        assert flops(gradient, W, X) == flops(jax.grad(mpjax.autocast(old)), W, X)
        assert set(flops(gradient, W, X)) == {"float16"}
        assert measures.relative_error(gradient(W, X), jax.grad(new)(W, X)) < 2e-3
    assert mpjax.audit(after, W, X).flops == mpjax.audit(before, W, X).flops


def test_the_solver_of_a_root_is_entered():
    report = mpjax.audit(jax.grad(mpjax.autocast(root)), W, X)
    assert report.half_share > 0.9
    assert measures.relative_error(jax.grad(mpjax.autocast(root))(W, X), jax.grad(root)(W, X)) < 2e-3


def kernel(x, w, out):
    out[...] = x[...] @ w[...]


def doubled(x, out):
    out[...] = x[...] * 2


def in_kernel(*arrays, body=kernel):
    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((4, 8), jnp.float32), interpret=True)(*arrays)


def foreign(x):
    return jax.ffi.ffi_call("mpjax_test_kernel", jax.ShapeDtypeStruct((4, 8), jnp.float32))(x)


def of_a_user(x, w):
    hijax = pytest.importorskip("jax.experimental.hijax")
    if not hasattr(hijax, "HiPrim"):
        pytest.skip("this JAX has no HiPrim")

    class UsersMatmul(hijax.HiPrim):
        def __init__(self, x, w):
            self.in_avals, self.out_aval, self.params = (x, w), x, {}
            super().__init__()

        def expand(self, x, w):
            return x @ w

    return UsersMatmul(jax.typeof(x), jax.typeof(w))(x, w)


OPAQUE = {
    "pallas_call": lambda w, x: jnp.sum(in_kernel(x @ w, w)),
    "ffi_call": lambda w, x: jnp.sum(foreign(x @ w)),
    "UsersMatmul": lambda w, x: jnp.sum(of_a_user(x @ w, w)),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_a_primitive_that_may_hold_matmuls_is_named_with_its_line(name):
    with pytest.warns(mpjax.AutocastWarning) as caught:
        jax.make_jaxpr(mpjax.autocast(lambda w, x: jnp.sum(x @ w @ w @ w @ w @ w) + OPAQUE[name](w, x)))(W, X)
    (message,) = (str(record.message) for record in caught)
    assert f"Not entered: {name} at test_hi_primitives.py:" in message
    assert "mpjax.half_function" in message


ELEMENTWISE = {
    "a kernel without matmuls": lambda w, x: jnp.sum(in_kernel(x @ w, body=doubled)),
    "a callback": lambda w, x: jnp.sum(
        jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((4, 8), jnp.float32), x @ w)
    ),
    "a kernel in a float_function": lambda w, x: jnp.sum(mpjax.float_function(in_kernel)(x @ w, w)),
    "a decomposition": lambda w, x: jnp.sum(jnp.linalg.cholesky(jnp.eye(8) + w @ w.T)) + jnp.sum(x @ w),
    "an fft": lambda w, x: jnp.sum(jnp.abs(jnp.fft.fft(x @ w))),
    "a sort": lambda w, x: jnp.sum(jnp.sort(x @ w)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_other_primitives_are_not(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.make_jaxpr(mpjax.autocast(ELEMENTWISE[name]))(W, X)
    assert not [record for record in caught if "Not entered" in str(record.message)]
