"""What a profile says besides time: FLOP/s."""

import jax
import jax.numpy as jnp
import pytest

import mpjax

SIDE = 128


def test_flops_are_those_of_the_matmuls_over_the_time_of_a_step():
    args = jnp.eye(SIDE), jnp.ones((SIDE, SIDE))
    fast = mpjax.profile(jax.jit(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w)), *args, steps=3, device="T4")
    assert fast.flops == 2 * 2 * SIDE**3
    assert fast.flops_per_second == pytest.approx(fast.flops / fast.step_seconds)
    assert fast.peak_flops == 8.1e12
    assert fast.mfu == pytest.approx(fast.flops_per_second / 8.1e12)
    assert "8.39 MFLOP a step" in str(fast)
