"""Decorators, disabled regions, nested autocasts."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from testing import measures

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def matmul_dtypes(fun, *args):
    # A new function each time, because `make_jaxpr` caches traces.
    return [str(e.in_dtypes[0]) for e in measures.matmuls(lambda *args: fun(*args), *args)]


def test_half_function_runs_even_sums_in_half_under_autocast_only():
    @mpjax.half_function
    def inside(x):
        return jnp.exp(x).sum()

    def loss(w, x):
        return inside(x @ w)

    risky = {e.name for e in measures.risky_in_half(mpjax.autocast(loss), W, X)}
    assert risky == {"exp", "reduce_sum"}
    assert inside(X).dtype == jnp.float32
    assert not measures.risky_in_half(loss, W, X)


def test_float_function_applies_to_its_gradient_and_through_jit_and_vmap():
    router = mpjax.float_function(jax.jit(lambda x, w: x @ w))

    def loss(w, x):
        return jnp.mean(jax.vmap(router, (0, None))(x, w) @ w)

    dtypes = matmul_dtypes(jax.grad(mpjax.autocast(loss)), W, X)
    assert sorted(set(dtypes)) == ["float16", "float32"]
    assert dtypes.count("float32") == 2  # forward, and its gradient with respect to w


def test_promote_function_runs_in_the_widest_dtype_of_its_inputs():
    add = mpjax.promote_function(lambda x, y: x * y + 1.0)

    def mixed(w, x):
        y = x @ w
        return jnp.sum(add(y, jnp.exp(y)) @ w), jnp.sum(add(y, y) @ w)

    rows = [row for row in mpjax.explain(mixed, W, X).rows if row.op == "mul"]
    assert [row.dtypes_in[0] for row in rows] == ["float32", "float16"]


@pytest.mark.parametrize("first", ["disabled", "enabled"])
def test_a_disabled_region_is_part_of_jits_cache_key(first):
    inner = jax.jit(mpjax.autocast(lambda w, x: jnp.mean(x @ w)))
    regions = {"disabled": (mpjax.autocast_disabled, "float32"), "enabled": (contextlib.nullcontext, "float16")}
    for region, dtype in (regions[first], *regions.values()):
        with region():
            assert matmul_dtypes(inner, W, X) == [dtype]


def test_a_jitted_inner_autocast_keeps_its_plan_in_any_order_of_calls():
    def layer(w, x):
        with jax.named_scope("precise"):
            return x @ w @ w

    inner = jax.jit(mpjax.autocast(lambda w, x: layer(w, x @ w), rules=mpjax.Rules(deny=["*/precise"])))
    inner(W, X)  # traced first outside of the outer autocast
    assert matmul_dtypes(mpjax.autocast(lambda w, x: inner(w, x) @ w), W, X) == ["float16", *["float32"] * 2, "float16"]


def test_inner_autocast_applies_to_its_body():
    inner = mpjax.autocast(lambda w, x: jnp.tanh(x @ w), "mixed_bfloat16", rules=mpjax.Rules(deny=["tanh"]))

    def loss(w, x):
        return jnp.mean(jnp.tanh(inner(w, x)) @ w)

    explained = [
        (e.name, str(e.in_dtypes[0]))
        for e in measures.equations(jax.make_jaxpr(mpjax.autocast(loss))(W, X))
        if e.name in ("tanh", "dot_general")
    ]
    assert explained[:2] == [("dot_general", "bfloat16"), ("tanh", "float32")]
    assert explained[3] == ("dot_general", "float16")


def test_float32_policy_is_the_identity():
    fun = mpjax.autocast(lambda w, x: jnp.mean(x @ w), "float32")
    assert matmul_dtypes(fun, W, X) == ["float32"]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half_function_casts_its_arguments_while_it_is_traced(half):
    seen = []

    @mpjax.half_function
    def kernel(x, w, *, scale, name):
        seen.append((x.dtype.name, w.dtype.name, scale.dtype.name, name))
        if x.dtype != half:
            raise NotImplementedError(f"half only, got {x.dtype}")
        return {"out": scale * (x @ w), "count": jnp.arange(3)}

    def loss(w, x):
        out = kernel(x @ w, w, scale=jnp.float32(2), name="k")["out"]
        assert out.dtype == jnp.float32
        return jnp.mean((jnp.tanh(out) @ w) ** 2)

    got = jax.grad(mpjax.autocast(loss, f"mixed_{half}"))(W / 4, X)
    assert seen == [(half, half, half, "k")]
    assert got.dtype == jnp.float32
    plain = jax.grad(lambda w: jnp.mean((jnp.tanh(2 * (X @ w @ w)) @ w) ** 2))(W / 4)
    assert jnp.allclose(got, plain, rtol=0.05)
    assert matmul_dtypes(mpjax.autocast(loss, f"mixed_{half}"), W, X) == [half] * 3
    with pytest.raises(NotImplementedError, match="got float32"):
        loss(W, X)


def test_half_function_calls_a_pallas_kernel_in_half():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def double(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    @mpjax.half_function
    def kernel(x):
        assert x.dtype == jnp.bfloat16
        return pallas.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    out = mpjax.autocast(lambda w, x: kernel(x @ w) @ w, "mixed_bfloat16")(W, X)
    assert jnp.allclose(out, 2 * X @ W @ W)


def test_half_function_in_a_disabled_region_is_unchanged():
    kernel = mpjax.half_function(lambda x: (x.dtype, x)[1])

    def loss(x):
        with mpjax.autocast_disabled():
            x = kernel(x @ x)
        return jnp.sum((x @ x) ** 2)

    assert matmul_dtypes(mpjax.autocast(loss), W) == ["float32", "float16"]


def float32_only(x):
    assert x.dtype == jnp.float32
    return x


@pytest.mark.parametrize(
    "inside",
    [
        lambda x, y: jax.lax.fori_loop(0, 2, lambda _, carry: (y, carry[1]), (x, x))[0],
        lambda x, y: jax.vjp(jnp.tanh, x)[1](y)[0],
        lambda x, y: float32_only(x),
    ],
    ids=["carry", "cotangent", "assertion"],
)
def test_a_half_function_with_float32_values_of_its_own_is_traced_as_written(inside):
    x = jnp.full((4, 4), 0.5)
    fun = mpjax.autocast(lambda x: mpjax.half_function(lambda h: inside(h, x) @ h)(x))
    np.testing.assert_allclose(fun(x), inside(x, x) @ x, rtol=5e-3)
    assert measures.half_share(fun, x) == 1.0
    whys = {row.why for row in mpjax.explain(fun, x).rows if row.op == "dot_general"}
    assert whys == {"half_function, traced with float32 arguments"}


def test_a_half_function_that_fails_in_both_dtypes_raises_its_error_in_half():
    @mpjax.half_function
    def kernel(x):
        raise NotImplementedError(f"not for {x.dtype}")

    with pytest.raises(NotImplementedError, match="not for float16"):
        mpjax.autocast(kernel)(W)
