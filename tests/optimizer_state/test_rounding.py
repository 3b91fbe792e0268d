"""Rounding to nearest equals a cast, stochastic rounding has the right mean, and XLA drops neither."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels.rounding import random_bits, round_stochastically, round_to_nearest
from mpjax.optimizer_state.rounding import key_from, next_words

DTYPES = ["float16", "bfloat16"]
WORDS = jnp.array([0x9E3779B9, 17], jnp.uint32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_nearest_is_a_cast(dtype):
    rng = np.random.default_rng(0)
    everything = rng.integers(0, 2**32, 1 << 18, dtype=np.uint32).view(np.float32)
    near = (rng.choice([-1, 1], 1 << 18) * 2.0 ** rng.uniform(-30, 17, 1 << 18)).astype(np.float32)
    ties = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-25, 3 * 2.0**-25, 65520, 0, -0.0])
    x = np.concatenate([everything, near, ties.astype(np.float32)])
    with np.errstate(all="ignore"):
        expected = x.astype(jnp.dtype(dtype))
    rounded = jax.jit(round_to_nearest, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(np.asarray(rounded, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounding_error_survives_compilation(dtype):
    # A cast there and back is dropped by XLA's excess precision on some backends.
    error = jax.jit(lambda x: x - round_to_nearest(x, dtype).astype(jnp.float32))(jnp.float32(1 + 2**-12))
    assert error == 2**-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_million_stochastic_roundings_have_the_right_mean(dtype):
    n = 10**6
    values = np.array([1 + 1 / 3, -0.7, 1.1e-5, 6.3e-8, 65000.1, 2 - 2**-13], np.float32)
    x = np.broadcast_to(values[:, None], (len(values), n))  # an argument: XLA would fold a constant's operations
    draw = jax.jit(lambda x, words: round_stochastically(x, dtype, random_bits(words, x.shape)))(x, WORDS)
    for value, rounded in zip(values, np.asarray(draw, np.float64), strict=True):
        assert set(np.unique(rounded)) <= set(_neighbours(value, dtype))
        four_sigma = 4 * (np.ptp(_neighbours(value, dtype)) / 2) / n**0.5
        assert abs(rounded.mean() - np.float64(value)) < four_sigma
        # Independent of each other: the lag-one correlation of n fair draws is below 4/√n.
        centred = (rounded - rounded.mean()) / rounded.std()
        assert abs((centred[1:] * centred[:-1]).mean()) < 4 / n**0.5


def _neighbours(x, dtype):
    """The numbers of the dtype next to x below and above, as float64."""
    nearest = x.astype(jnp.dtype(dtype))
    towards = np.array(np.inf if nearest.astype(np.float32) < x else -np.inf, nearest.dtype)
    return sorted([float(nearest), float(np.nextafter(nearest, towards))])


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_and_special_numbers_are_unchanged(dtype):
    largest = float(jnp.finfo(dtype).max)
    up_or_down = jax.jit(lambda x, bits: round_stochastically(x, dtype, bits))
    # Nearest rounding takes this down to the largest number.
    above = largest * (1 + 2.0 ** -(int(jnp.finfo(dtype).nmant) + 3))
    x = np.array([0.0, -0.0, 1.0, -1.5, largest, -largest, np.inf, -np.inf, np.nan], np.float32)
    # The draw 2**32 - 1 rounds up every number that is not exact.
    for draw in (0, 2**32 - 1):
        rounded = up_or_down(x, np.full(x.shape, draw, np.uint32))
        np.testing.assert_array_equal(np.asarray(rounded, np.float32), x)
        np.testing.assert_array_equal(np.signbit(np.asarray(rounded, np.float32)[:-1]), np.signbit(x[:-1]))
    assert np.isfinite(np.asarray(up_or_down(np.full(9, above, np.float32), np.full(9, 2**32 - 1, np.uint32)))).all()


def test_random_bits_are_fair_and_differ_by_words_and_position():
    bits = np.asarray(random_bits(WORDS, (64, 4096)))
    assert len(np.unique(bits)) > 0.999 * bits.size
    ones = np.unpackbits(bits.view(np.uint8)).reshape(bits.size, 32).mean(0)
    assert np.all(np.abs(ones - 0.5) < 5 * 0.5 / bits.size**0.5)
    for other in (WORDS.at[0].add(1), WORDS.at[1].add(1)):  # also for words that differ by one
        changed = np.unpackbits((bits ^ np.asarray(random_bits(other, bits.shape))).view(np.uint8)).mean()
        assert abs(changed - 0.5) < 0.01


def test_each_step_and_each_array_has_separate_words():
    key, seen = key_from(3), []
    for _ in range(3):
        key, words = next_words(key, 5)
        seen += map(tuple, np.asarray(words))
    assert len(set(seen)) == 15
    np.testing.assert_array_equal(key_from(np.int64(3)), key_from(3))
    assert key_from(jax.random.key(3, impl="rbg")).shape == (2,)
