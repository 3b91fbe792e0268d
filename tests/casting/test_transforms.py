"""Transformations outside and inside, and derivative rules of every form: one small program each.

NumPy evaluates the larger ones, because eager operations are compiled one by one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

import mpjax
from testing import measures
from testing.random_programs.evaluate import in_numpy

_rng = np.random.default_rng(0)
W, X = (jnp.asarray(_rng.normal(size=shape) / size, jnp.float32) for shape, size in (((8, 8), 8**0.5), ((4, 8), 1)))


def model(w, x):
    return jnp.mean(jax.nn.softmax(jax.nn.gelu(x @ w)) @ w * jnp.sin(x @ w))


def close(found, expected, tolerance=5e-3):
    assert measures.relative_error(found, expected) < tolerance


def test_forward_mode_and_linearize():
    cast = mpjax.autocast(model)
    tangents = (np.ones_like(W), np.ones_like(X))

    def derivatives(fun):
        return lambda w, x: (*jax.jvp(fun, (w, x), tangents), jax.linearize(fun, w, x)[1](*tangents))

    close(in_numpy(derivatives(cast))(W, X), in_numpy(derivatives(model))(W, X))


def test_second_derivatives():
    def along(fun):
        return in_numpy(jax.grad(lambda w: jnp.vdot(jax.grad(fun)(w, X), W)))(W)

    close(along(mpjax.autocast(model)), along(model), 2e-2)


def test_autocast_of_a_jvp_and_of_a_hessian_vector_product():
    def product(w, x):
        return jax.jvp(jax.grad(lambda w: model(w, x)), (w,), (jnp.ones_like(w),))[1]

    cast = mpjax.autocast(product)
    assert measures.half_share(lambda *args: cast(*args), W, X) == 1.0
    close(in_numpy(cast)(W, X), in_numpy(product)(W, X), 2e-2)


def test_collective_over_a_vmapped_axis():
    def fun(w, x):
        y = x @ w
        return jnp.sum((y - lax.pmean(y, "batch")) @ w)

    cast, plain = (in_numpy(jax.vmap(f, (None, 0), axis_name="batch")) for f in (mpjax.autocast(fun), fun))
    batch = np.stack([X, 2 * X])
    # The sums cancel to a hundredth of their terms.
    close(cast(W, batch), plain(W, batch), 2e-2)


def test_per_example_gradients():
    cast, plain = (in_numpy(jax.vmap(jax.grad(f), (None, 0))) for f in (mpjax.autocast(model), model))
    batch = np.stack([X, X + 1])
    close(cast(W, batch), plain(W, batch))


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


@pytest.mark.parametrize("symbolic", [False, True])
def test_custom_jvp_with_an_integer_and_a_symbolic_tangent(symbolic):
    @jax.custom_jvp
    def layer(x, w, power):
        return x @ w * power

    def rule(primals, tangents):
        x, w, power = primals
        dx, dw, _ = tangents
        if symbolic:
            assert type(dw) is jax.custom_derivatives.SymbolicZero
            return layer(x, w, power), 5.0 * dx @ w
        return layer(x, w, power), 5.0 * dx @ w + x @ dw

    layer.defjvp(rule, symbolic_zeros=symbolic)

    def loss(w, x):
        return jnp.sum(layer(x @ w, lax.stop_gradient(w) if symbolic else w, 3) @ w)

    if symbolic:  # a constant's tangent is known to be zero
        constant = jnp.asarray(np.eye(8, dtype=np.float32))
        loss = lambda w, x: jnp.sum(layer(x @ w, constant, 3) @ w)
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


def test_custom_vjp_that_closes_over_an_outer_value():
    def loss(w, x):
        scale = lax.stop_gradient(jnp.max(x))

        @jax.custom_vjp
        def scaled(x):
            return x * scale

        scaled.defvjp(lambda x: (x * scale, scale), lambda scale, ct: (ct * scale * 2,))
        return jnp.sum(scaled(x @ w) @ w)

    close(in_numpy(jax.grad(mpjax.autocast(loss)))(W, X), in_numpy(jax.grad(loss))(W, X))


def test_rule_is_kept_under_vmap_remat_and_scan():
    @jax.custom_vjp
    def wrong(x):
        return jnp.tanh(x)

    wrong.defvjp(lambda x: (jnp.tanh(x), x), lambda x, ct: (7.0 * ct,))

    def loss(w, x):
        block = jax.checkpoint(lambda h, _: (wrong(h @ w), None))
        return jnp.sum(jax.vmap(lambda x: lax.scan(block, x, None, length=2)[0])(x))

    close(in_numpy(jax.grad(mpjax.autocast(loss)))(W, X), in_numpy(jax.grad(loss))(W, X))


def test_while_loop_with_a_matmul_under_vmap():
    def fun(w, x):
        def turn(state):
            n, x = state
            return n + 1, jnp.tanh(x @ w)

        return lax.while_loop(lambda state: (state[0] < 5) & (jnp.max(state[1]) > 0.1), turn, (0, x))

    args, cast = (W, np.stack([X, 0.001 * X])), mpjax.autocast(fun, rules=mpjax.Rules(infer=["while"]))
    found, expected = (in_numpy(jax.vmap(f, (None, 0)))(*args) for f in (cast, fun))
    np.testing.assert_array_equal(found[0], expected[0])
    close(found[1], expected[1])


def test_branches_of_different_precision_agree():
    def fun(flag, w, x):
        y = x @ w
        y = lax.cond(flag, lambda y: jax.nn.softmax(y), lambda y: jnp.abs(y), y)
        return jnp.sum(lax.switch(2, [lambda y: y, jnp.exp, lambda y: y @ w], y) @ w)

    for flag in (True, False):
        args = np.array(flag), W, X
        found, expected = (in_numpy(jax.value_and_grad(f, 1))(*args) for f in (mpjax.autocast(fun), fun))
        close(found[0], expected[0])
        close(found[1], expected[1])


def test_vmapped_branch_and_reverse_scan():
    def fun(flags, w, xs):
        def turn(h, x):
            return jax.vmap(lambda f, h: lax.cond(f, lambda h: h @ w, jnp.exp, h))(flags, jnp.tanh(h + x)), h

        h, hs = lax.scan(turn, jnp.zeros((4, 8)), xs, reverse=True, unroll=2)
        return jnp.sum(h) + jnp.sum(hs**2)

    args = np.array([True, False, True, True]), W, np.stack([X, 2 * X, -X, X + 1])
    close(in_numpy(jax.grad(mpjax.autocast(fun), 1))(*args), in_numpy(jax.grad(fun, 1))(*args), 1e-2)


def test_donated_argument_of_an_eager_inner_jit_gives_no_wrong_number():
    layer = jax.jit(lambda w, x: x @ w, donate_argnums=1)

    def fun(w, x):
        return jnp.sum(layer(w, x * 1.0))

    close(mpjax.autocast(fun)(W, X), fun(W, X))


def test_value_and_gradient_are_float32_for_each_dtype_of_half():
    for policy in ("mixed_float16", "mixed_bfloat16"):
        value, grads = jax.eval_shape(jax.value_and_grad(mpjax.autocast(model, policy)), W, X)
        assert value.dtype == grads.dtype == jnp.float32


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
