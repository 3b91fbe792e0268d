"""Device memory: the requirements of a program, the capacity of a device, and the largest batch that fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory of a program in XLA's plan: arguments, results and temporaries; donated arguments count once."""
    plan: Any = compiled.memory_analysis()
    total = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return total - plan.alias_size_in_bytes


def peak_bytes() -> int | None:
    """Peak bytes allocated on the first device by this process; None if its allocator does not count them (a CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def device_bytes() -> int | None:
    """Memory of the first device; None if its allocator has no limit (a CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a JAX error reports that the device is out of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


def batch_sizes(start: int, growth: float, most: int) -> list[int]:
    """Candidate batch sizes: `start`, then each at least `growth` times the previous one, up to `most`.

    Sizes of 8 or more are multiples of 8, because the batch is also a dimension of matmuls.
    """
    sizes = [start]
    while True:
        size = math.ceil(sizes[-1] * growth)
        size = size if size < 8 else math.ceil(size / 8) * 8
        if size > most:
            return sizes
        sizes.append(size)


def largest_batch(sizes: Sequence[int], bytes_needed: Callable[[int], int], limit: int) -> int | None:
    """The largest batch size whose step fits, found with a few compilations.

    Memory is nearly linear in the batch size, so a line through two known sizes predicts the next one to try. Every
    fourth attempt bisects instead, for plans that are not linear.

    Args:
        sizes: Candidate batch sizes in ascending order.
        bytes_needed: Returns the bytes of a step at a size. If it raises an error that `is_out_of_memory` recognises,
            that size does not fit. Called at most once per size.
        limit: Memory limit in bytes.

    Returns:
        One of `sizes`; None if not even the smallest fits.
    """
    known: dict[int, int] = {}

    def fits(index: int) -> bool:
        try:
            needed = bytes_needed(sizes[index])
        except Exception as error:
            if is_out_of_memory(error):
                return False
            raise
        known[index] = needed
        return needed <= limit

    if not sizes or not fits(0):
        return None
    largest, too_large = 0, len(sizes)
    guess = bisect.bisect_right(sizes, 8 * sizes[0]) - 1
    attempts = 0
    while too_large - largest > 1:
        attempts += 1
        guess = min(max(guess, largest + 1), too_large - 1)
        if fits(guess):
            largest = guess
        else:
            too_large = guess
        extrapolate = attempts % 4 and len(known) > 1
        guess = _extrapolated_index(sizes, known, limit) if extrapolate else (largest + too_large) // 2
    return sizes[largest]


def _extrapolated_index(sizes: Sequence[int], known: dict[int, int], limit: int) -> int:
    """The last index at which the line through the two largest known sizes is within the limit."""
    left, right = sorted(known)[-2:]
    slope = max(1.0, (known[right] - known[left]) / (sizes[right] - sizes[left]))
    return bisect.bisect_right(sizes, sizes[left] + (limit - known[left]) / slope) - 1
