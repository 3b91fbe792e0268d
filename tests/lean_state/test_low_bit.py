"""Moments in low bits: what is kept, what it costs, and what it can be wrapped in."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.lean_state.blockwise import Blockwise, decode, encode
from mpjax.lean_state.rounding import random_bits

DTYPES = ["bfloat16", "float8", "int8"]
BYTES = ["float8", "int8"]
WORDS = jnp.array([5, 9], jnp.uint32)
STORED = {"float8": "float8_e4m3fn", "int8": "int8"}


@functools.partial(jax.jit, static_argnums=(1, 2))
def stored(x, dtype, block=256):
    return encode(x, STORED[dtype], block, random_bits(WORDS, x.shape))


decoded = jax.jit(decode)


def spread(shape, positive=False, decades=4):
    rng = np.random.default_rng(0)
    x = rng.choice([-1, 1], shape) * 10.0 ** rng.uniform(-decades, 0, shape)
    return (np.abs(x) if positive else x).astype(np.float32)


SHAPES = [(5,), (3, 1009), (2, 4, 512), (512, 10)]


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_comes_back_near_itself(shape, dtype):
    for x in (spread(shape), spread(shape, positive=True)):
        got = stored(x, dtype)
        assert got.codes.shape == shape
        assert got.scales.size <= max(1, x.size / 100)
        back = np.asarray(decoded(got))
        # Within a code: of the number's size (float8, and int8 far down) or of the block's largest (1 or less).
        assert np.all(np.abs(back - x) <= 0.27 * np.abs(x) + 3e-4)
        assert np.all(np.sign(back) * np.sign(x) >= 0)


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("positive", [False, True])
def test_a_million_stored_numbers_have_the_right_mean(dtype, positive):
    row = np.concatenate([[1.0], spread(15, positive, decades=3)]).astype(np.float32)
    x = jnp.tile(jnp.asarray(row), (2**16, 1))
    back = np.asarray(jax.jit(lambda x: decode(stored(x, dtype, block=16)))(x), np.float64)
    sigma = back.std(0) / back.shape[0] ** 0.5
    # 1e-6: the draw decides between two float32 values, which are rounded themselves.
    np.testing.assert_array_less(np.abs(back.mean(0) - row), 4 * sigma + 1e-6 * np.abs(row))
    assert (sigma[1:] > 0).all()


@pytest.mark.parametrize("dtype", BYTES)
def test_numbers_of_no_sign_are_never_flushed_to_zero(dtype):
    x = np.array([1.0, 1e-12, 1e-6, 0.0], np.float32)
    assert np.all(np.asarray(decoded(stored(x, dtype)))[:3] > 0)
    np.testing.assert_array_equal(decoded(stored(np.zeros(300, np.float32), dtype)), 0)


@pytest.mark.parametrize("dtype", BYTES)
def test_a_nonfinite_number_is_not_hidden(dtype):
    for bad in (np.nan, np.inf, -np.inf):
        x = spread((2, 256))
        x[0, 7] = bad
        back = np.asarray(decoded(stored(x, dtype)))
        assert not np.isfinite(back[0]).any()
        assert np.isfinite(back[1]).all()


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("scale", [1e-42, 1e-37, 1e37])
def test_blocks_of_tiny_and_of_huge_numbers(dtype, scale):
    x = (spread(256, positive=True, decades=1) * np.float32(scale)).astype(np.float32)
    back = np.asarray(decoded(stored(x, dtype)))
    assert np.all(np.abs(back - x) <= max(0.27 * x.max(), 2.0**-119))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_slow_moment_follows(dtype):
    # Of a second moment a step of 0.1 % is below half the spacing of each of these: to nearest it would stand still.
    tx = mpjax.low_bit_state(optax.ema(0.999, debias=False), dtype, min_size=1)
    params = jnp.ones(2048)
    gradient = jnp.concatenate([jnp.ones(1024), jnp.tile(jnp.array([1.0, 0.5]), 512)])
    step = jax.jit(lambda s: tx.update(gradient, s)[1])
    state = tx.init(params)
    for _ in range(400):
        state = step(state)
    reached = np.asarray(tx.update(gradient, state)[0])
    expected = (1 - 0.999**401) * np.asarray(gradient)
    halves = np.asarray(gradient) == 0.5
    for group in (halves, ~halves):
        np.testing.assert_allclose(reached[group].mean(), expected[group].mean(), rtol=0.02)


def test_bytes_a_parameter():
    params = {"w": jnp.ones((512, 512)), "conv": jnp.ones((3, 3, 64, 64)), "b": jnp.ones(512)}
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    count = sum(p.size for p in jax.tree.leaves(params))

    def bytes_each(params, tx):
        state = jax.eval_shape(tx.init, params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state))) / count

    adam = optax.adamw(1e-3)
    assert bytes_each(params, adam) == pytest.approx(12, abs=0.1)
    assert bytes_each(half, mpjax.master_weights(adam, "p=bf16")) == pytest.approx(14, abs=0.1)
    assert bytes_each(half, mpjax.kahan(adam)) == pytest.approx(12, abs=0.1)
    assert bytes_each(half, mpjax.stochastic_rounding(adam)) == pytest.approx(10, abs=0.1)
    assert bytes_each(half, mpjax.stochastic_rounding(mpjax.low_bit_state(adam, "bfloat16"))) < 6.1
    assert bytes_each(half, mpjax.kahan(mpjax.low_bit_state(adam, "int8"))) < 6.2
    for dtype in BYTES:
        assert bytes_each(half, mpjax.stochastic_rounding(mpjax.low_bit_state(adam, dtype))) <= 4.2


def test_a_jitted_init_encodes_no_zeros_while_it_compiles():
    tx = mpjax.low_bit_state(optax.adam(1e-3), "int8")
    text = jax.jit(tx.init).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile().as_text()
    # XLA's evaluator would take minutes for the moments of a real layer.
    assert "s8[64,64]" in text
    assert not re.search(r"s8\[64,\S* constant|s8\[64,64\]\S* broadcast", text)


def test_small_arrays_counters_and_what_is_kept_stay_float32():
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    state = mpjax.low_bit_state(optax.adam(1e-3), keep=("*/nu",)).init(params).inner_state[0]
    assert isinstance(state.mu["w"], Blockwise)
    assert state.nu["w"].dtype == state.mu["b"].dtype == jnp.float32
    assert state.count.dtype == jnp.int32


def test_bad_arguments_are_told():
    adam, params = optax.adam(1e-3), {"w": jnp.ones((64, 64), jnp.bfloat16)}
    for dtype in ("int4", "float16", jnp.float32, None, 8):
        with pytest.raises(ValueError, match=r"dtype=.*'int8'"):
            mpjax.low_bit_state(adam, dtype)
    with pytest.raises(ValueError, match="block_size=0"):
        mpjax.low_bit_state(adam, block_size=0)
    with pytest.raises(ValueError, match=r"'\*/nv' matches none.*mu/w"):
        mpjax.low_bit_state(adam, keep=("*/nv",)).init(params)
    for wrapper in (mpjax.kahan, lambda tx: mpjax.master_weights(tx, "p=bf16")):
        with pytest.raises(ValueError, match=r"(kahan|master_weights)\(low_bit_state\(tx\)\)"):
            mpjax.low_bit_state(wrapper(adam)).init(params)
    assert mpjax.low_bit_state(adam, jnp.bfloat16).init(params)


# A small regression in half params: one wrapped optimizer for all that it must compose with.


def lean(dtype="int8", **kwargs):
    return mpjax.stochastic_rounding(mpjax.low_bit_state(optax.adamw(3e-3), dtype, min_size=256, **kwargs))


def problem(half=jnp.bfloat16):
    rng = np.random.default_rng(0)
    w, x, true = (rng.normal(size=shape).astype(np.float32) for shape in ((32, 32), (64, 32), (32, 32)))
    params = {"w": jnp.asarray((w / 6).astype(half)), "b": jnp.asarray(np.zeros(32, half))}
    y = np.tanh(x @ true / 6)

    def loss(params):
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return jnp.mean((jnp.tanh(x @ wide["w"] + wide["b"]) - y) ** 2)

    return params, loss


def trainer(tx, loss):
    def step(params, state, scale=1.0):
        value, grads = mpjax.value_and_grad(loss, None)(params)
        grads = jax.tree.map(lambda g: g * scale, grads)
        return (*mpjax.apply_gradients(tx, grads, state, params), value)

    return jax.jit(step, donate_argnums=(0, 1))


STOCHASTIC, KAHAN = mpjax.stochastic_rounding, mpjax.kahan


def losses_of(tx, params, loss):
    """The first and the last loss of 300 steps, and the final parameters."""
    step, state, values = trainer(tx, loss), jax.jit(tx.init)(params), []
    for _ in range(300):
        params, state, value = step(params, state)
        values.append(value)
    return float(values[0]), float(values[-1]), params


@pytest.fixture(scope="module")
def losses_in_float32():
    return losses_of(optax.adamw(3e-3), *problem(jnp.float32))[:2]


@pytest.mark.parametrize(("wrapper", "dtype"), [(STOCHASTIC, "bfloat16"), (STOCHASTIC, "int8"), (KAHAN, "float8")])
def test_a_regression_ends_where_float32_ends(wrapper, dtype, losses_in_float32):
    start, reference = losses_in_float32
    _, reached, params = losses_of(wrapper(mpjax.low_bit_state(optax.adamw(3e-3), dtype, min_size=256)), *problem())
    assert reference < 0.02 * start
    assert reached < reference + 0.01 * start
    assert params["w"].dtype == jnp.bfloat16


@pytest.mark.standard_promotion  # of optax.MultiSteps
def test_a_skipped_step_changes_nothing_and_multi_steps_accumulates():
    params, loss = problem()
    tx = mpjax.dynamic_loss_scale(optax.MultiSteps(lean(), 2))
    step = jax.jit(lambda p, s, scale: trainer(tx, loss)(p, s, scale)[:2])
    state = jax.jit(tx.init)(params)
    new, after = step(params, state, np.float32(np.inf))
    jax.tree.map(np.testing.assert_array_equal, (new, after.inner_state), (params, state.inner_state))
    for _ in range(2):  # the first half of a pair moves nothing either
        jax.tree.map(np.testing.assert_array_equal, new, params)
        new, after = step(new, after, np.float32(1))
    assert int(after.inner_state.gradient_step) == 1
    assert np.mean(np.asarray(new["w"]) != np.asarray(params["w"])) > 0.5


def test_states_are_donated_and_keep_their_dtypes():
    params, loss = problem()
    tx = lean("float8")
    state = jax.jit(tx.init)(params)
    step = trainer(tx, loss)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (params, state))
    old = jax.tree.leaves((params, state))
    params, state, _ = step(params, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (params, state)) == shapes
    assert all(x.is_deleted() for x in old)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_sharded_states_take_the_same_steps(dtype):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, loss = problem()
    tx = lean(dtype, block_size=32)
    step, state = trainer(tx, loss), jax.jit(tx.init)(params)

    def place(x):
        spec = P("data") if x.ndim and x.shape[0] == 32 else P()
        return jax.device_put(x, NamedSharding(mesh, spec))

    # Copies: the steps donate.
    sharded = jax.tree.map(lambda x: place(np.asarray(x)), (params, state))
    plain = (params, state)
    for _ in range(3):
        plain, sharded = step(*plain)[:2], step(*sharded)[:2]
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(sharded), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # The gradient's sum has another order, so a draw that falls between the two decides differently.
        assert np.mean(a != b) < 0.02
    codes = sharded[1].inner_state.inner_state[0].mu["w"]
    assert not jax.tree.leaves(codes)[0].sharding.is_fully_replicated


def test_blocks_of_a_sharded_array_need_no_communication():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = lean()
    params = {"w": np.ones((64, 256), jnp.bfloat16)}
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("data") if x.ndim == 2 else P()))
    params, state = jax.tree.map(place, (params, jax.jit(tx.init)(params)))
    grads = {"w": place(np.ones((64, 256), np.float32))}
    step = jax.jit(lambda *a: mpjax.apply_gradients(tx, *a))
    compiled = step.lower(grads, state, params).compile().as_text()
    for collective in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
        assert f" {collective}(" not in compiled


def test_orbax_saves_and_restores_and_training_goes_on_bitwise(tmp_path):
    params, loss = problem()
    tx = mpjax.dynamic_loss_scale(lean())
    step, state = trainer(tx, loss), jax.jit(tx.init)(params)
    params, state, _ = step(params, state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", (params, state))
    with ocp.StandardCheckpointer() as checkpointer:
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
        restored = checkpointer.restore(tmp_path / "saved", shapes)
    jax.tree.map(np.testing.assert_array_equal, restored, (params, state))
    jax.tree.map(np.testing.assert_array_equal, step(*restored), step(params, state))
