"""For a GPU only: half arithmetic of Tensor Cores, memory of the compiled step, the skip on the device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from testing.measures import relative_error, rounding_error

pytestmark = pytest.mark.gpu

MODEL = nn.Sequential([nn.Dense(512), nn.tanh, nn.Dense(512), nn.tanh, nn.Dense(64)])
HALVES = ["mixed_float16", "mixed_bfloat16"]


@pytest.fixture(scope="module")
def batch():
    return jax.random.normal(jax.random.key(1), (2048, 256))


@pytest.fixture(scope="module")
def params(batch):
    return MODEL.init(jax.random.key(0), batch)


def loss_of(apply):
    return lambda params, x: jnp.mean(apply(params, x) ** 2)


WAYS = {
    "autocast": lambda policy: mpjax.autocast(loss_of(MODEL.apply), policy),
    "module": lambda policy: loss_of(mpjax.with_policy(MODEL, policy).apply),
}


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_as_close_as_rounding_allows(way, policy, params, batch):
    opt_state = mpjax.loss_scale_for(optax.sgd(0.1), policy).init(params)
    with jax.default_matmul_precision("highest"):  # the reference in float32, not TF32
        reference = jax.grad(loss_of(MODEL.apply))(params, batch)
        limit = 3 * rounding_error(loss_of(MODEL.apply), params, batch, mpjax.get_policy(policy).compute_dtype)
    grads = jax.jit(lambda p, s, x: mpjax.grad(WAYS[way](policy), s)(p, x))(params, opt_state, batch)
    assert relative_error(grads, reference) <= limit


@pytest.mark.parametrize("way", WAYS)
def test_compiled_step_takes_less_memory_than_float32(way, params):
    batch = jax.ShapeDtypeStruct((2**15, 256), jnp.float32)  # so many that cuBLAS's workspace of 32 MiB is a small part

    def temporary_bytes(loss):
        return jax.jit(jax.grad(loss)).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    # Activations dominate here, and they are all half: 0.5, and room for the float32 gradients.
    assert temporary_bytes(WAYS[way]("mixed_float16")) <= 0.8 * temporary_bytes(loss_of(MODEL.apply))


def test_overflow_on_the_device_skips_the_step(params, batch):
    tx = mpjax.dynamic_loss_scale(optax.adam(1e-3))
    loss = WAYS["module"]("mixed_float16")

    @jax.jit
    def step(params, state, x):
        value, grads = mpjax.value_and_grad(loss, state)(params, x)
        return mpjax.apply_gradients(tx, grads, state, params, value=value)

    state = tx.init(params)
    same, skipped = step(params, state, batch.at[3, 3].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, same, params)
    assert int(skipped.skipped_steps) == 1
    _, taken = step(params, state, batch)
    assert int(taken.skipped_steps) == 0


def test_float8_matmuls_run_on_tensor_cores():
    if float(jax.devices()[0].compute_capability) < 8.9:
        pytest.skip("no float8 units")
    params = jax.random.normal(jax.random.key(0), (4, 2048, 2048)) / 2048**0.5
    x = jax.random.normal(jax.random.key(1), (4096, 2048))

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    step = jax.jit(jax.grad(mpjax.autocast(loss_fn, "mixed_float8")))
    compiled = step.lower(params, x).compile()
    # Two eligible layers: forward, and both matmuls of the gradient. Autotuning may choose another kernel of float8.
    assert compiled.as_text().count("f8e4m3fn[2048,2048]") > 0
    with jax.default_matmul_precision("highest"):
        reference = jax.grad(loss_fn)(params, x)
    assert 1e-3 < relative_error(compiled(params, x), reference) < 0.15
