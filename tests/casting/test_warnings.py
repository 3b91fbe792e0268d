"""Autocast's warnings: each message quotes the value and a solution."""

from __future__ import annotations

import re
import warnings

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import sparse

import mpjax
from mpjax import AutocastWarning
from testing import measures

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.standard_promotion  # half weights and a float32 batch
@pytest.mark.parametrize("batched", [False, True])
def test_frozen_half_params_need_no_master_weights(batched):
    summed = lambda p, x: loss({"w": p["w"] + p["factors"]}, x)
    frozen, fun = W.astype(jnp.bfloat16), mpjax.autocast(summed, "mixed_bfloat16")

    def of_factors(factors, x):
        run = jax.vmap(lambda x: fun({"w": frozen, "factors": factors}, x)) if batched else None
        return jnp.sum(run(x[:, None])) if batched else fun({"w": frozen, "factors": factors}, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(of_factors)(W, X)
    with pytest.warns(AutocastWarning, match="master weights are missing"):
        jax.grad(lambda params: fun(params, X))({"w": frozen, "factors": W})


@pytest.mark.standard_promotion  # half weights and a float32 batch
@pytest.mark.parametrize("inner", [lambda fun: fun, jax.jit])
def test_trained_half_params_lack_master_weights(inner):
    fun = inner(mpjax.autocast(loss))
    params = {"w": W.astype(jnp.float16)}

    with pytest.warns(
        AutocastWarning,
        match=r"args\[0\]\['w'\] \(float16\).*master weights are missing.*mpjax.master_weights"
        ".*'params=float16,compute=float16,output=float32'",
    ):
        jax.grad(fun)(params, X)
    fun(params, X)  # nothing is trained
    # A policy of half params says that the optimizer makes up for their rounding.
    of_half_params = "params=float16,compute=float16,output=float32"
    jax.grad(inner(mpjax.autocast(loss, of_half_params)))(params, X)


@pytest.mark.standard_promotion  # the other way round
def test_half_batch_beside_float32_params_is_legitimate():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpjax.autocast(loss)({"w": W}, X.astype(jnp.float16))


def test_model_that_is_already_half_is_reported_and_not_cast_twice():
    def half_model(params, x):
        return jnp.mean((x.astype(jnp.float16) @ params["w"].astype(jnp.float16)).astype(jnp.float32))

    cast = mpjax.autocast(half_model)
    with pytest.warns(AutocastWarning, match="all 1 matmuls.* in half already"):
        jaxpr = jax.make_jaxpr(cast)({"w": W}, X)
    assert len(jaxpr.eqns) == len(jax.make_jaxpr(half_model)({"w": W}, X).eqns)


def test_nothing_to_cast_is_reported():
    with pytest.warns(AutocastWarning, match=r"no matmul or convolution .* to run in float16.*mpjax.explain"):
        mpjax.autocast(lambda x: jnp.sum(jnp.exp(x)))(X)


HIGHEST = (
    r"Left in float32: 2 dot_general \(the program requests precision HIGHEST, which Rules\(allow=\['dot_general'\]\)"
)


def test_matmuls_of_a_fixed_precision_are_named_and_can_be_overridden():
    fun = lambda w, x: jnp.sum(jnp.dot(jnp.dot(x, w, precision="highest"), w, precision="highest"))
    ways_out = "2 dot_general (the program requests precision HIGHEST, which Rules(allow=['dot_general']) overrides)"
    with pytest.warns(AutocastWarning, match=re.escape(f"Left in float32: {ways_out}")):
        mpjax.autocast(fun)(W, X)
    assert measures.half_share(mpjax.autocast(fun, rules=mpjax.Rules(allow=["dot_general"])), W, X) == 1.0


def _kernel(x, w):
    return pl.pallas_call(lambda x, w, o: o.__setitem__(..., x[...] @ w[...]), out_shape=x, interpret=True)(x, w)


# Each runs one matmul in float32 for a reason that the user may not know of.
MOSTLY_FLOAT32 = {
    "dot_general (the program requests precision HIGHEST": lambda x, w: jnp.dot(x, w, precision="highest"),
    "dot_general (pallas_call runs as traced)": _kernel,
    "noinline (noinline runs as traced)": eqxi.noinline(lambda x, w: x @ w),
    "bcoo_dot_general (bcoo_dot_general runs as traced)": lambda x, w: sparse.BCOO.fromdense(x, nse=x.size) @ w,
}


@pytest.mark.parametrize("cause", MOSTLY_FLOAT32)
def test_much_of_the_work_left_in_float32_is_one_warning_with_its_cause(cause):
    work = MOSTLY_FLOAT32[cause]
    fun = lambda w, x: jax.lax.scan(lambda x, _: (work(x, w), None), x, length=3)[0] @ w
    with pytest.warns(AutocastWarning) as caught:
        jax.make_jaxpr(mpjax.autocast(fun))(W, X)
    (message,) = (str(w.message) for w in caught)
    assert "75% of the FLOPs" in message
    assert f"3 {cause}" in message


def test_little_work_or_work_left_on_purpose_is_no_warning():
    precise = mpjax.float_function(jnp.dot)
    fun = lambda w, x: precise(precise(jnp.dot(x, w, precision="highest") @ w @ w @ w @ w @ w, w), w)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mpjax.autocast(fun)(W, X)


def test_float64_inputs_are_reported():
    with jax.enable_x64(True):
        args = {"w": W.astype(jnp.float64)}, X.astype(jnp.float64)
        with pytest.warns(AutocastWarning) as caught:
            mpjax.autocast(loss)(*args)
    assert any("args[0]['w'] (float64)" in str(w.message) for w in caught)


@pytest.mark.parametrize("call", [lambda fun, *args: fun(*args), mpjax.audit])
def test_numpy_arrays_that_jax_reads_as_float32_are_no_warning(call):
    args = {"w": np.asarray(W, np.float64)}, np.asarray(X, np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(mpjax.autocast(loss), *args)


@pytest.mark.parametrize("inside", [lambda fun: fun, jax.jit, mpjax.grad])
def test_warning_points_at_the_caller(inside):
    with pytest.warns(AutocastWarning) as caught:
        inside(mpjax.autocast(lambda x: jnp.sum(x)))(X)
    assert caught[0].filename == __file__


WRITTEN = {
    "the policy's override pattern 'haed'": lambda: mpjax.autocast(jnp.dot, "mixed_float16;haed=>float32"),
    "Rules(deny=...): '*/haed'": lambda: mpjax.autocast(jnp.dot, rules=mpjax.Rules(deny=["*/haed"])),
    "MPJAX_DENYLIST_ADD: '*/haed'": lambda: mpjax.autocast(jnp.dot),
    "Float8(deny=...): '*/haed'": lambda: mpjax.autocast(
        jnp.dot, "mixed_float8", rules=mpjax.Rules(float8=mpjax.Float8(deny=["*/haed"]))
    ),
    "the policy's override pattern 'other'": lambda: mpjax.autocast(jnp.dot, "mixed_float8;other=>mixed_bfloat16"),
}


@pytest.mark.filterwarnings("ignore:autocast. cpu is not known")
@pytest.mark.filterwarnings("ignore:the policy's float8 matmuls")
@pytest.mark.parametrize("text", WRITTEN)
def test_a_pattern_without_a_match_is_blamed_on_who_wrote_it(text, monkeypatch):
    if text.startswith("MPJAX"):
        monkeypatch.setenv("MPJAX_DENYLIST_ADD", "*/haed")
    with pytest.warns(mpjax.UnusedRuleWarning) as caught:
        WRITTEN[text]()(X, W)
    (message,) = (str(record.message) for record in caught if "matched no operation" in str(record.message))
    assert message.startswith(text)


SOLVED = {
    "cholesky": jnp.linalg.cholesky,
    "solve": lambda a: jnp.linalg.solve(a, X.T),
    "eigh": lambda a: jnp.linalg.eigh(a)[0],
    "svd": lambda a: jnp.linalg.svd(a)[1],
    "expm": jax.scipy.linalg.expm,
    "lax": jax.lax.linalg.cholesky,
}


@pytest.mark.parametrize("name", SOLVED)
def test_the_precision_that_jax_gives_a_decomposition_is_not_the_programs(name):
    loss = lambda w: jnp.sum(SOLVED[name](w @ w.T + 8 * jnp.eye(8)))
    with pytest.warns(AutocastWarning) as caught:
        jax.make_jaxpr(mpjax.autocast(jax.grad(loss)))(W)
    told = " ".join(str(w.message) for w in caught)
    assert "a part of a decomposition, a solve or its derivative" in told
    assert "precision HIGHEST" not in told
    assert "precision HIGHEST" not in str(mpjax.explain(jax.grad(loss), W))
