"""Low-bit moments: their accuracy, their cost, and wrappers around them."""

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
from mpjax.kernels.rounding import random_bits
from mpjax.optimizer_state.low_bit import Blockwise, decode, encode
from testing.random_programs.evaluate import arrays_in_numpy

BYTES = ["float8", "int8"]
WORDS = np.array([5, 9], np.uint32)
STORED = {"float8": "float8_e4m3fn", "int8": "int8"}


def stored(x, dtype, block=256):
    return encode(x, STORED[dtype], block, random_bits(WORDS, x.shape))


@functools.partial(jax.jit, static_argnums=(1, 2))
def round_trip(x, dtype, block=256):
    """An array stored and restored; all tests but one compile it for two blocks of 256 numbers."""
    return decode(stored(x, dtype, block))


def spread(shape, positive=False, decades=4):
    rng = np.random.default_rng(0)
    x = rng.choice([-1, 1], shape) * 10.0 ** rng.uniform(-decades, 0, shape)
    return (np.abs(x) if positive else x).astype(np.float32)


SHAPES = [(5,), (3, 1009), (2, 4, 512), (512, 10)]


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_survives_a_round_trip(shape, dtype):
    both = arrays_in_numpy(lambda x: (encoded := stored(x, dtype), decode(encoded)))
    for x in (spread(shape), spread(shape, positive=True)):
        got, back = jax.tree.map(np.asarray, both(x))
        assert got.codes.shape == shape
        assert got.scales.size <= max(1, x.size / 100)
        # Within a code: of the number's size (float8, and int8 far down) or of the block's largest (1 or less).
        assert np.all(np.abs(back - x) <= 0.27 * np.abs(x) + 3e-4)
        assert np.all(np.sign(back) * np.sign(x) >= 0)


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("positive", [False, True])
def test_a_million_stored_numbers_have_the_right_mean(dtype, positive):
    row = np.concatenate([[1.0], spread(15, positive, decades=3)]).astype(np.float32)
    back = np.asarray(round_trip(np.tile(row, (2**16, 1)), dtype, 16), np.float64)
    sigma = back.std(0) / back.shape[0] ** 0.5
    # 1e-6: the draw decides between two float32 values, which are rounded themselves.
    np.testing.assert_array_less(np.abs(back.mean(0) - row), 4 * sigma + 1e-6 * np.abs(row))
    assert (sigma[1:] > 0).all()


@pytest.mark.parametrize("dtype", BYTES)
def test_unsigned_numbers_are_never_flushed_to_zero(dtype):
    x = np.zeros((2, 256), np.float32)
    x[0, :3] = 1.0, 1e-12, 1e-6
    back = np.asarray(round_trip(x, dtype))
    assert np.all(back[0, :3] > 0)
    np.testing.assert_array_equal(back[1], 0)


@pytest.mark.parametrize("dtype", BYTES)
def test_a_nonfinite_number_is_not_hidden(dtype):
    for bad in (np.nan, np.inf, -np.inf):
        x = spread((2, 256))
        x[0, 7] = bad
        back = np.asarray(round_trip(x, dtype))
        assert not np.isfinite(back[0]).any()
        assert np.isfinite(back[1]).all()


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("scale", [1e-42, 1e-37, 1e37, 3.4e38])
def test_blocks_of_tiny_and_of_huge_numbers(dtype, scale, positive):
    x = (spread((2, 256), positive, decades=1) * np.float32(scale)).astype(np.float32)
    back = np.asarray(round_trip(x, dtype))
    assert np.all(np.abs(back - x) <= max(0.27 * np.abs(x).max(), 2.0**-119))


@pytest.mark.parametrize("dtype", BYTES)
def test_the_codes_of_a_block_that_left_the_range_are_zeros(dtype):
    x = np.array([[1, np.inf], [-1, np.nan]], np.float32)
    got = arrays_in_numpy(lambda x: stored(x, dtype, 2))(x)
    np.testing.assert_array_equal(np.isnan(got.scales), True)
    np.testing.assert_array_equal(np.asarray(got.codes, np.float32), 0)  # which a NaN becomes depends on the machine


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_slow_moment_follows(dtype):
    # A step of 0.1 % is below half the spacing of each of these: rounded to nearest, the moment would never change.
    tx = mpjax.low_bit_state(optax.ema(0.999, debias=False), dtype, min_size=1)
    gradient = np.concatenate([np.ones(1024), np.tile([1.0, 0.5], 512)]).astype(np.float32)
    step = jax.jit(lambda s: tx.update(gradient, s))
    state = arrays_in_numpy(tx.init)(gradient)
    for _ in range(401):
        reached, state = step(state)
    reached = np.asarray(reached)
    expected = (1 - 0.999**401) * gradient
    halves = gradient == 0.5
    for group in (halves, ~halves):
        np.testing.assert_allclose(reached[group].mean(), expected[group].mean(), rtol=0.02)


def test_bytes_per_parameter():
    params = {"w": np.ones((512, 512), np.float32), "conv": np.ones((3, 3, 64, 64), np.float32)}
    params["b"] = np.ones(512, np.float32)
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


def test_small_arrays_counters_and_kept_leaves_stay_float32():
    params = {"w": np.ones((64, 64), np.float32), "b": np.ones(64, np.float32)}
    state = jax.eval_shape(mpjax.low_bit_state(optax.adam(1e-3), keep=("*/nu",)).init, params).inner_state[0]
    assert isinstance(state.mu["w"], Blockwise)
    assert state.nu["w"].dtype == state.mu["b"].dtype == jnp.float32
    assert state.count.dtype == jnp.int32


def test_bad_arguments_are_reported():
    adam, params = optax.adam(1e-3), {"w": np.ones((64, 64), jnp.bfloat16)}
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
    assert jax.eval_shape(mpjax.low_bit_state(adam, jnp.bfloat16).init, params)


# A small regression in half params.


RNG = np.random.default_rng(0)
START = {"w": RNG.normal(size=(32, 32)).astype(np.float32) / 6, "b": np.zeros(32, np.float32)}
HALF = jax.tree.map(lambda p: p.astype(jnp.bfloat16), START)
INPUTS = RNG.normal(size=(64, 32)).astype(np.float32)
TARGETS = np.tanh(INPUTS @ RNG.normal(size=(32, 32)).astype(np.float32) / 6)


def loss(params):
    params32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    return jnp.mean((jnp.tanh(INPUTS @ params32["w"] + params32["b"]) - TARGETS) ** 2)


def step_of(tx):
    def step(params, state, scale=1.0):
        value, grads = mpjax.value_and_grad(loss)(params)
        grads = jax.tree.map(lambda g: g * scale, grads)
        return (*mpjax.apply_gradients(tx, grads, state, params), value)

    return step


class Trainer:
    """An optimizer's initial state, evaluated without XLA, and its step, compiled once."""

    def __init__(self, tx, params=HALF):
        self.tx, self.params = tx, params
        self.step = jax.jit(step_of(tx), donate_argnums=(0, 1))

    def start(self):
        return jax.device_put(self.params), arrays_in_numpy(self.tx.init)(self.params)

    def train(self):
        """The first and the last loss of 300 steps, and the final parameters."""
        (params, state), values = self.start(), []
        for _ in range(300):
            params, state, value = self.step(params, state)
            values.append(value)
        return float(values[0]), float(values[-1]), params


ADAMW = optax.adamw(3e-3)


def lean(dtype="int8", inner=ADAMW, **kwargs):
    return mpjax.stochastic_rounding(mpjax.low_bit_state(inner, dtype, min_size=256, **kwargs))


@pytest.fixture(scope="module")
def in_int8():
    return Trainer(lean())


@pytest.fixture(scope="module")
def losses_in_float32():
    return Trainer(ADAMW, START).train()[:2]


@pytest.mark.parametrize("kind", ["int8", "bfloat16", "kahan of float8"])
def test_a_regression_ends_where_float32_ends(kind, in_int8, losses_in_float32):
    start, reference = losses_in_float32
    of_float8 = mpjax.low_bit_state(ADAMW, "float8", min_size=256)
    others = {"bfloat16": lean("bfloat16"), "kahan of float8": mpjax.kahan(of_float8)}
    _, reached, params = (Trainer(others[kind]) if kind in others else in_int8).train()
    assert reference < 0.02 * start
    assert reached < reference + 0.01 * start
    assert params["w"].dtype == jnp.bfloat16


def test_states_are_donated_and_keep_their_dtypes(in_int8):
    old = in_int8.start()
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), old)
    new = in_int8.step(*old)[:2]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == shapes
    assert all(x.is_deleted() for x in jax.tree.leaves(old))


def test_sharded_states_take_the_same_steps():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    trainer = Trainer(lean(block_size=32))
    plain = trainer.start()

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, P("data") if x.ndim and x.shape[0] == 32 else P()))

    sharded = jax.tree.map(place, trainer.start())
    in_one_process = arrays_in_numpy(step_of(trainer.tx))
    for _ in range(3):
        plain, sharded = in_one_process(*plain)[:2], trainer.step(*sharded)[:2]
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(sharded), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # The gradient's sum has another order, so a draw that falls between the two decides differently.
        assert np.mean(a != b) < 0.02
    codes = sharded[1].inner_state.inner_state[0].mu["w"]
    assert not jax.tree.leaves(codes)[0].sharding.is_fully_replicated


def test_meshes_with_explicit_axes():
    mesh = jax.make_mesh((2, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    specs = {
        (512, 64): P("d", "m"),
        (8, 64, 64): P("m", None, "d"),
        (3, 3, 64, 128): P(None, None, None, ("d", "m")),
        (8192,): P("m"),
    }
    params = [np.ones(shape, np.float32) for shape in specs]
    grads = [np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in specs]
    tx = mpjax.low_bit_state(optax.adam(1e-3))

    def train(params, grads, run):
        init, step = run(tx.init), run(lambda *args: mpjax.apply_gradients(tx, *args))
        state = init(params)
        for _ in range(2):
            params, state = step(grads, state, params)
        return params, state

    plain, _ = train(params, grads, arrays_in_numpy)
    with jax.set_mesh(mesh):
        place = lambda tree: [jax.device_put(x, spec) for x, spec in zip(tree, specs.values(), strict=True)]
        sharded, state = train(place(params), place(grads), jax.jit)
    for a, b, moment, spec in zip(plain, sharded, state.inner_state[0].mu, specs.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        assert b.sharding.spec == moment.codes.sharding.spec == spec


def test_blocks_of_a_sharded_array_need_no_communication():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = lean(inner=optax.sgd(1e-3, momentum=0.9))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("data") if x.ndim == 2 else P()))
    params = {"w": np.ones((64, 256), jnp.bfloat16)}
    grads = {"w": np.ones((64, 256), np.float32)}
    args = jax.tree.map(place, (grads, arrays_in_numpy(tx.init)(params), params))
    compiled = jax.jit(lambda *a: mpjax.apply_gradients(tx, *a)).lower(*args).compile().as_text()
    for collective in ("all-gather", "all-reduce", "collective-permute", "all-to-all"):
        assert f" {collective}(" not in compiled


def test_orbax_saves_and_restores_and_training_goes_on_bitwise(tmp_path, in_int8):
    saved = in_int8.step(*in_int8.start())[:2]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", saved)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "saved", jax.tree.map(ocp.utils.to_shape_dtype_struct, saved))
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    # NumPy arrays, because the step would be compiled again for the devices that Orbax chose.
    again = in_int8.step(*jax.tree.map(np.asarray, restored))
    jax.tree.map(np.testing.assert_array_equal, again, in_int8.step(*saved))
