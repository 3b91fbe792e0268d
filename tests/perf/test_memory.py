"""The search for the largest batch, and the sizes that it chooses from."""

import itertools

import pytest

from perf.memory import batch_sizes, is_out_of_memory, largest_batch

POWERS = [2**k for k in range(21)]


def counted(plan):
    """A plan that records the requested sizes."""
    requested = []

    def bytes_needed(size):
        requested.append(size)
        return plan(size)

    return bytes_needed, requested


@pytest.mark.parametrize(
    ("plan", "most_compilations"),
    [
        (lambda size: 1000 + 70 * size, 5),
        (lambda size: 500_000 + size, 5),
        (lambda size: 1000 + 70 * size + size**2 // 50, 9),  # bends upwards
        (lambda size: 1000 + 70 * size - min(size, 3000) * 20, 9),  # bends downwards
        (lambda size: 7 * max(size, 300), 9),  # flat at first
    ],
)
@pytest.mark.parametrize("sizes", [POWERS, batch_sizes(4, 1.06, 2**20)])
@pytest.mark.parametrize("limit", [10_000, 555_555, 7_000_000])
def test_finds_the_largest_size_with_few_compilations(plan, most_compilations, sizes, limit):
    bytes_needed, requested = counted(plan)
    expected = max((size for size in sizes if plan(size) <= limit), default=None)
    assert largest_batch(sizes, bytes_needed, limit) == expected
    assert len(set(requested)) == len(requested) <= most_compilations + (sizes is not POWERS) * 4


def test_running_out_of_memory_means_too_large():
    def bytes_needed(size):
        if size > 100:  # it fits according to the plan, but not on the device
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return size

    assert largest_batch(POWERS, bytes_needed, 10**9) == 64
    assert largest_batch(batch_sizes(4, 1.06, 10**4), bytes_needed, 10**9) == 96


def test_out_of_memory_is_distinguished_from_other_errors():
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"))
    assert not is_out_of_memory(RuntimeError("INVALID_ARGUMENT"))


def test_any_other_error_is_raised():
    def bytes_needed(size):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        largest_batch(POWERS, bytes_needed, 10**9)


def test_no_size_fits():
    assert largest_batch(POWERS, lambda size: 10**6 + size, 10**6) is None
    assert largest_batch([], lambda size: 0, 10**6) is None


def test_batch_sizes_grow_by_the_factor_in_multiples_of_eight():
    assert batch_sizes(2, 1.5, 40) == [2, 3, 5, 8, 16, 24, 40]
    sizes = batch_sizes(256, 1.06, 10**4)
    assert all(1.06 <= b / a < 1.1 for a, b in itertools.pairwise(sizes))
