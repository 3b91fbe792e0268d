"""What half precision can gain: three programs apart, an interval, and no program that beats the least time."""

import time

import jax
import jax.numpy as jnp
import pytest

import mpjax

F32, BF16 = jnp.float32, jnp.bfloat16


def attention(w, x):
    q, k, v = (jnp.einsum("bsd,dhe->bhse", x, w[i]) for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("bhse,bhte->bhst", q, k) / 8)
    return jnp.mean(jnp.einsum("bhst,bhte->bhse", weights, v) ** 2)


def shapes(batch, length, width, heads, dtype=F32):
    w = jax.ShapeDtypeStruct((3, width, heads, width // heads), dtype)
    return w, jax.ShapeDtypeStruct((batch, length, width), dtype)


LARGE = shapes(8, 1024, 512, 8)


@pytest.fixture(scope="module")
def bounds():
    in_half = mpjax.autocast(attention, "mixed_bfloat16")
    calls = {
        "float32": (jax.grad(attention), LARGE),
        "planned": (mpjax.autocast(jax.grad(attention), "mixed_float16"), LARGE),
        "autocast": (jax.jit(jax.grad(in_half)), LARGE),
        "bfloat16 weights": (jax.grad(attention), shapes(8, 1024, 512, 8, BF16)),
    }
    return {name: mpjax.audit(fun, *args).speedup_bound("H200") for name, (fun, args) in calls.items()}


def test_the_float32_program_is_the_one_without_autocast(bounds):
    # Also where jax.jit remembers the function under autocast; casts and recomputation are not in it.
    assert bounds["autocast"].float32 == pytest.approx(bounds["float32"].now)
    assert bounds["autocast"].least_float32 == pytest.approx(bounds["float32"].least_now)


def test_the_half_program_is_the_one_that_autocast_plans(bounds):
    assert bounds["float32"].half == pytest.approx(bounds["planned"].now)
    assert bounds["float32"].speedup == 1.0
    assert bounds["float32"].limit_interval == pytest.approx(bounds["planned"].interval)


def test_what_has_half_weights_is_compared_with_float32_ones(bounds):
    assert bounds["bfloat16 weights"].float32 == pytest.approx(bounds["float32"].now, rel=0.01)
    assert bounds["bfloat16 weights"].speedup == pytest.approx(2, rel=0.01)


def test_fused_attention_does_not_beat_the_least_time(bounds):
    report = mpjax.audit(jax.grad(mpjax.autocast(attention, "mixed_bfloat16")), *LARGE)
    arithmetic = sum(report.flops.values()) / 989.4e12
    assert bounds["autocast"].least_now == pytest.approx(arithmetic)
    assert bounds["autocast"].least_now < bounds["autocast"].now / 4  # The scores go to memory and back there.
    low, high = bounds["autocast"].interval
    assert low == pytest.approx(1.95, abs=0.1)
    assert high == pytest.approx(2.0, abs=0.02)


def test_where_bfloat16_is_emulated_half_gains_little(bounds):
    report = mpjax.audit(jax.grad(mpjax.autocast(attention, "mixed_bfloat16")), *LARGE)
    assert report.speedup_bound("V100").interval[0] < 1.3  # No Tensor Cores for it.
    assert report.speedup_bound("V100").interval[1] < 2


def test_a_table_that_is_read_in_parts_is_not_read_whole():
    table = jax.ShapeDtypeStruct((10**6, 64), F32)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    bound = mpjax.audit(lambda table, ids: jnp.sum(table[ids]), table, ids).speedup_bound("H200")
    assert bound.least_now < 1e-9


def test_a_measured_float32_time_takes_the_place_of_the_roofline(bounds):
    report = mpjax.audit(jax.grad(mpjax.autocast(attention, "mixed_bfloat16")), *LARGE)
    bound = report.speedup_bound("H200", float32_seconds=1.0)
    assert bound.interval == pytest.approx((1 / bound.now, 1 / bound.least_now))


def best(*calls):
    """The least time of each call in seconds, measured in turn: other work on the machine slows all of them down."""
    calls = [(jax.jit(fun), args) for fun, args in calls]
    times = [[] for _ in calls]
    for _ in range(12):
        for (fun, args), found in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(fun(*args))
            found.append(time.perf_counter() - start)
    return map(min, times)


def mlp(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w[0])
    return jnp.mean(x**2)


@pytest.mark.parametrize("fun", [attention, mlp])
def test_no_measured_time_on_this_cpu_beats_the_least_time(fun):
    """With the peak rates that this CPU reaches at the same time; a factor of two for other work on the machine."""
    w, x = jax.ShapeDtypeStruct((1, 256, 256), F32), jax.ShapeDtypeStruct((256, 256), F32)
    args = (w, x) if fun is mlp else shapes(1, 256, 128, 2)
    arrays = jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), args)
    in_half = mpjax.autocast(fun, "mixed_bfloat16")
    matrix = jnp.ones((512, 512))
    peaks = (lambda x: x @ x, (matrix,)), (lambda x: x + 1, (matrix,))
    matmul, copy, float32, half = best(*peaks, (jax.grad(fun), arrays), (jax.grad(in_half), arrays))
    gigabytes, teraflops = 2 * matrix.nbytes / copy / 1e9, 2 * 512**3 / matmul / 1e12
    report = mpjax.audit(jax.grad(in_half), *args)
    bound = report.speedup_bound(f"{gigabytes},{teraflops},{teraflops}", float32_seconds=float32)
    assert half > bound.least_now / 2
    assert float32 / half < 2 * bound.interval[1]
