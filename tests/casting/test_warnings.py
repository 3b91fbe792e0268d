"""Autocast's warnings: each message quotes the value and a solution."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax import AutocastWarning

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))


def loss(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.standard_promotion  # half weights and a float32 batch
def test_half_params_lack_master_weights():
    with pytest.warns(
        AutocastWarning,
        match=r"args\[0\]\['w'\] \(float16\).*master weights are missing.*mpjax.master_weights",
    ):
        mpjax.autocast(loss)({"w": W.astype(jnp.float16)}, X)


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


def test_float64_inputs_are_reported():
    with jax.enable_x64(True):
        args = {"w": W.astype(jnp.float64)}, X.astype(jnp.float64)
        with pytest.warns(AutocastWarning) as caught:
            mpjax.autocast(loss)(*args)
    assert any("args[0]['w'] (float64)" in str(w.message) for w in caught)


def test_warning_points_at_the_caller():
    with pytest.warns(AutocastWarning) as caught:
        mpjax.autocast(lambda x: jnp.sum(x))(X)
    assert caught[0].filename == __file__
