"""Transformations and derivative rules that random programs do not draw: one small program each.

NumPy evaluates the larger ones, because eager operations are compiled one by one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, sparse
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax
from testing import measures
from testing.random_programs.evaluate import in_numpy

_rng = np.random.default_rng(0)
W, X = (jnp.asarray(_rng.normal(size=shape) / size, jnp.float32) for shape, size in (((8, 8), 8**0.5), ((4, 8), 1)))


def model(w, x):
    return jnp.mean(jax.nn.softmax(jax.nn.gelu(x @ w)) @ w * jnp.sin(x @ w))


def close(found, expected, tolerance=5e-3):
    assert measures.relative_error(found, expected) < tolerance


@pytest.mark.parametrize("symbolic", [False, True])
def test_custom_vjp_with_an_integer_a_missing_and_a_symbolic_cotangent(symbolic):
    @jax.custom_vjp
    def layer(x, w, power, unused):
        return x @ w * power, unused * 2

    def fwd(x, w, power, unused):
        if symbolic:
            x, w, power, unused = (arg.value for arg in (x, w, power, unused))
        return (x @ w * power, unused * 2), (x, w, power)

    def bwd(kept, cts):
        x, w, _ = kept
        ct = cts[0]
        if symbolic:
            assert type(cts[1]) is jax.custom_derivatives.SymbolicZero
        assert x.dtype == w.dtype == ct.dtype == jnp.float32
        return 3.0 * ct @ w.T, x.T @ ct, None, None

    layer.defvjp(fwd, bwd, symbolic_zeros=symbolic)

    def loss(w, x):
        return jnp.sum(layer(jnp.tanh(x @ w), w, 2, x)[0] @ w)

    cast = mpjax.autocast(loss)
    close(in_numpy(jax.grad(cast))(W, X), in_numpy(jax.grad(loss))(W, X))
    assert measures.half_share(jax.grad(lambda *args: cast(*args)), W, X) == 1.0


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("looped", [False, True])
def test_custom_vjp_in_a_shard_map_outside_of_jit(inside, looped):
    @jax.custom_vjp
    def layer(w, x):
        return x @ w

    layer.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda kept, ct: (3.0 * kept[1].T @ ct, 2.0 * ct @ kept[0].T))

    def body(w, x):
        return lax.scan(lambda x, _: (layer(w, x), None), x, None, length=1)[0] if looped else jnp.sin(layer(w, x))

    def loss(body, w, x):
        mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("i"), P("i")), out_specs=P("i"))
        return jnp.sum(mapped(w, x))

    w, plain = jnp.concatenate([W, W]), functools.partial(loss, body)
    cast = functools.partial(loss, mpjax.autocast(body)) if inside else mpjax.autocast(plain)
    close(jax.value_and_grad(cast)(w, X), jax.jit(jax.value_and_grad(plain))(w, X))


def test_custom_jvp_with_an_integer_and_a_symbolic_tangent():
    constant = jnp.asarray(np.eye(8, dtype=np.float32))  # its tangent is known to be zero

    @jax.custom_jvp
    def layer(x, w, power):
        return x @ w * power

    def rule(primals, tangents):
        x, w, power = primals
        assert type(tangents[1]) is jax.custom_derivatives.SymbolicZero
        return layer(x, w, power), 5.0 * tangents[0] @ w

    layer.defjvp(rule, symbolic_zeros=True)

    def loss(w, x):
        return jnp.sum(layer(x @ w, constant, 3) @ w)

    cast = mpjax.autocast(loss)
    close(in_numpy(jax.grad(cast))(W, X), in_numpy(jax.grad(loss))(W, X))
    assert measures.half_share(jax.grad(lambda *args: cast(*args)), W, X) == 1.0


def test_custom_jvp_called_with_python_scalars():
    @jax.custom_jvp
    def layer(x, scale, shift):
        return x @ W * scale + shift

    layer.defjvp(lambda primals, tangents: (layer(*primals), 3.0 * (tangents[0] @ W) * primals[1] + tangents[2]))

    def loss(x, w):
        return jnp.sum(layer(x @ w, 0.5, 1.0) @ w)

    for fun in (mpjax.autocast(loss), jax.jit(mpjax.autocast(loss))):
        close(fun(X, W), in_numpy(loss)(X, W))
        close(jax.grad(fun)(X, W), in_numpy(jax.grad(loss))(X, W))


def test_donated_argument_of_an_eager_inner_jit_gives_no_wrong_number():
    layer = jax.jit(lambda w, x: x @ w, donate_argnums=1)

    def fun(w, x):
        return jnp.sum(layer(w, x * 1.0))

    close(mpjax.autocast(fun)(W, X), fun(W, X))


def test_methods_partials_and_closures_over_tracers():
    class Net:
        def loss(self, w, x):
            return model(w, x)

    expected, gradient = in_numpy(jax.value_and_grad(model))(W, X)
    close(in_numpy(mpjax.autocast(Net().loss))(W, X), expected, 1e-2)
    close(in_numpy(mpjax.autocast(functools.partial(model, W)))(X), expected, 1e-2)
    outer = jax.grad(lambda w: mpjax.autocast(lambda x: model(w, x))(X))
    close(in_numpy(outer)(W), gradient)


@pytest.mark.filterwarnings("ignore:autocast")
def test_operations_that_jax_replaces_when_it_lowers_a_program():
    def loss(w, x):
        def tangent_solve(g, y):
            return jnp.linalg.solve(jax.jacobian(g)(y), y)

        root = lax.custom_root(lambda y: w @ y - x[0], x[1], lambda f, y: jnp.linalg.solve(w, x[0]), tangent_solve)
        return jnp.sum(x @ jax.scipy.linalg.expm(w / 9)) + jnp.sum(root)

    jax.jit(jax.value_and_grad(mpjax.autocast(loss))).lower(W, X)


def test_sparsify_of_an_autocast_function_as_the_docs_describe():
    fun = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    arguments = sparse.BCOO.fromdense(W), X
    with pytest.raises(NotImplementedError, match="sparse rule for detached is not implemented"):
        sparse.sparsify(mpjax.autocast(fun))(*arguments)
    found = sparse.sparsify(mpjax.autocast(fun, rules=mpjax.Rules(weight_gradients="half")))(*arguments)
    close(found, fun(W, X), 1e-2)


@pytest.mark.parametrize("errors", [checkify.user_checks, checkify.all_checks], ids=["user", "all"])
@pytest.mark.parametrize("outside", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_under_checkify(errors, outside):
    """JAX's rule for a remat with one flag per operand adds operands, but no flags for them."""

    def loss(w, x, check=checkify.check):
        y = jnp.tanh(x @ w) * 2
        check(jnp.all(y < 1.5), "too large")
        return jnp.mean(jax.nn.softmax(y @ w) ** 2)

    def unchecked(w, x):
        return loss(w, x, lambda *_: None)

    cast = functools.partial(mpjax.autocast, policy="mixed_float16")
    checked = outside(checkify.checkify(jax.grad(cast(loss)), errors=errors))
    for scale, fails in ((0.1, False), (1.0, True)):
        w, x = scale * jnp.eye(4), jnp.ones((2, 4))
        error, found = checked(w, x)
        assert bool(error.get()) == fails
        np.testing.assert_array_equal(found, jax.grad(cast(unchecked))(w, x))


def test_own_primitives_run_where_jit_is_disabled():
    def attend(w, x):
        q, k, v = (jnp.reshape(x @ w, (1, 4, 4, 4)) for _ in range(3))
        return jnp.mean(jax.nn.dot_product_attention(q, k, v))

    def gated(w, x):
        return jnp.mean((jax.nn.gelu(x @ w) @ w) ** 2)

    w, x = jnp.tile(W, (2, 2)), jnp.tile(X, (1, 2))  # Rows of fewer than 16 elements are not packed.
    for fun, options in (attend, {"attention": "fused"}), (gated, {"residuals": "int8"}):
        cast = mpjax.autocast(fun, "mixed_bfloat16", rules=mpjax.Rules(**options))
        with jax.disable_jit():
            found = jax.grad(cast)(w, x)
        close(found, jax.grad(cast)(w, x), 1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ties_of_a_maximum_share_its_gradient(dtype):
    """Of a half value and a float32 one, both were the largest in part: 1.5 times the gradient."""

    def loss(x, w):
        kept = lax.fori_loop(0, 0, lambda _, h: h @ w, x)
        return jnp.sum(jnp.maximum(kept, x) * jnp.arange(1.0, 9.0))

    for cast in (jax.grad(mpjax.autocast(loss, f"mixed_{dtype}")), mpjax.autocast(jax.grad(loss), f"mixed_{dtype}")):
        np.testing.assert_array_equal(cast(X, W), jax.grad(loss)(X, W))
