"""The NumPy evaluator computes what XLA does."""

import jax
import jax.numpy as jnp
import numpy as np

from testing.random_programs.evaluate import in_numpy

X = np.random.default_rng(0).normal(size=(5, 6, 7)).astype(np.float32)
ROWS, BOTH = np.array([1, -7, 8]), np.array([[0, 4], [-1, 9], [3, 2]])  # some are outside


def gathers(x):
    yield from (x[BOTH], x[:, ROWS], x[BOTH[:, 0], :, ROWS], jnp.take(x, ROWS, axis=2))
    yield x.at[BOTH].get(mode="clip")
    for filled in (x, x.astype(int), jnp.abs(x).astype(np.uint8), x > 0):
        yield filled.at[BOTH].get(mode="fill")
    yield x.at[:, ROWS].get(mode="fill", fill_value=3.0)
    yield jax.vmap(lambda a, i: a[i])(x, jnp.arange(5))
    yield jax.vmap(lambda a, i: jax.lax.dynamic_slice(a, (i, i), (2, 3)))(x, jnp.arange(5))


def sums(x):
    yield from (x.at[BOTH].add(2.0), x.at[:, ROWS].add(x[:, :3]), x.at[1:3, ::2].add(1.0))
    yield x.at[ROWS, :, ROWS].add(1.0, mode="clip")
    yield jax.ops.segment_sum(x.reshape(-1, 7), jnp.arange(30) % 4, 4)
    yield jax.vmap(lambda a, i: a.at[i].add(1.0))(x, jnp.arange(5))
    yield jax.grad(lambda x: sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in gathers(x)))(x)


def extremes(x):
    yield from (x.at[BOTH].max(0.5), x.at[:, ROWS].min(x[:, :3]))
    yield x.at[ROWS, :, ROWS].max(1.0, mode="clip")
    yield x.astype(int).at[BOTH].max(1)
    yield jax.grad(lambda x: jnp.sum(jnp.sin(jax.ops.segment_max(x.reshape(-1, 7), jnp.arange(30) % 4, 4))))(x)


def test_gathers_and_scatters_are_those_of_xla():
    def both(x):
        return [*gathers(x), *sums(x), *extremes(x)]

    for found, expected in zip(in_numpy(both)(X), jax.jit(both)(X), strict=True):
        np.testing.assert_allclose(found, np.asarray(expected, np.float64), rtol=1e-5, atol=1e-5)


def test_a_scattered_maximum_keeps_the_digits_of_float64():
    """Its derivative looks for the elements that equal it."""
    slope = in_numpy(jax.grad(lambda x: jnp.sum(jax.ops.segment_max(x / 3, jnp.arange(30) % 4, 4))))(X.reshape(-1, 7))
    np.testing.assert_allclose(np.sum(slope), 4 * 7 / 3, rtol=1e-6)


def test_a_reduction_to_a_dtypes_own_precision_keeps_subnormal_numbers():
    def reduced(x):  # as `jax.checkpoint` writes it
        return jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)

    for dtype, kept in ((np.float16, [3e-5, 1e-6, 1]), (np.float32, [0, 0, 1])):
        x = np.array([3e-5, 1e-6, 1], dtype)
        for out in (in_numpy(reduced)(x), jax.jit(reduced)(x)):
            np.testing.assert_allclose(np.asarray(out, np.float64), kept, rtol=0.02)


def test_keys_move_as_arrays_do():
    def drawn(x):
        keys = jnp.broadcast_to(jax.random.key(0), (3, 2)).T.reshape(3, 2)[1:]
        return x[0, 0, 0] + jax.vmap(jax.vmap(jax.random.uniform))(keys)

    np.testing.assert_allclose(in_numpy(drawn)(X), jax.jit(drawn)(X), rtol=1e-6)
