"""What a profile says besides time: FLOP/s and the trace."""

import jax
import jax.numpy as jnp
import pytest

import mpjax

SIDE = 128


def small(w, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return jnp.sum(h @ w)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    args = jnp.eye(SIDE), jnp.ones((SIDE, SIDE))
    return mpjax.profile(jax.jit(small), *args, steps=3, trace=folder / "trace", device="50,2,1"), folder


def test_flops_are_those_of_the_matmuls_over_the_time_of_a_step(profiles):
    fast, _ = profiles
    assert fast.flops == 2 * 2 * SIDE**3
    assert fast.flops_per_second == pytest.approx(fast.flops / fast.step_seconds)
    assert fast.peak_flops == 1e12
    assert fast.mfu == pytest.approx(fast.flops_per_second / 1e12)
    assert "8.39 MFLOP a step" in str(fast)


def test_the_trace_is_kept_for_xprof_and_perfetto(profiles):
    files = {path.name for path in (profiles[1] / "trace").glob("plugins/profile/*/*")}
    assert "perfetto_trace.json.gz" in files
    assert any(name.endswith(".xplane.pb") for name in files)
