"""Range statistics: on the host and on a device they are the same, and NumPy's."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.inspection.ranges import range_statistics
from mpjax.inspection.ranges.range_statistics import Limits, tally_of


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_counts_are_those_of_a_cast_to_half(dtype):
    rng, limits = np.random.default_rng(0), Limits.of(jnp.dtype(dtype))
    edges = [0, -0.0, limits.flushed, limits.overflowed, np.inf, -np.inf, np.nan, float(jnp.finfo(dtype).max)]
    x = np.concatenate([rng.normal(size=9990) * 10.0 ** rng.uniform(-44, 38, 9990), edges, [1e-45, 3e38]])
    x = x.astype(np.float32).reshape(100, 100)
    with np.errstate(over="ignore"):
        half = x.astype(jnp.dtype(dtype))
    for note in (range_statistics.note_on_host, range_statistics.note_on_device):
        found = note([x], limits)
        tally = tally_of(found)
        assert tally.size == x.size
        assert tally.zeros == np.sum(x == 0)
        assert tally.flushed == np.sum((half == 0) & (x != 0))
        assert tally.overflowed == np.sum(np.isinf(half) & np.isfinite(x))
        assert tally.nonfinite == np.sum(~np.isfinite(x))
        sizes = np.abs(x[np.isfinite(x)])
        assert (tally.max, tally.min_nonzero) == (sizes.max(), sizes[sizes > 0].min())
        assert np.asarray(found[2]).sum() == np.sum(sizes > 0)


def test_nothing_is_an_empty_tally():
    for note in (range_statistics.note_on_host, range_statistics.note_on_device):
        found = note([np.zeros((0, 3), np.float32)], Limits.of(jnp.float16))
        assert tally_of(found) == range_statistics.Tally()
