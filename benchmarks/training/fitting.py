"""The largest batch of a cell that fits a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from perf.memory import batch_sizes, largest_batch

from .cells import Cell
from .configurations import Training, training

GROWTH = 1.06  # between two batch sizes to choose from


def largest_batch_of(cell: Cell, toy: bool, limit: int, bytes_needed: Callable[[Training], int]) -> int:
    """The largest batch, within some six percent, with which a step fits.

    Args:
        cell, toy: the model and its configuration.
        limit: bytes of the device.
        bytes_needed: compiles a step, runs it where there is a device, and returns the bytes of its plan; it may raise
            where memory does not suffice.

    Raises:
        MemoryError: not even an eighth of the model's batch fits.
    """
    workload = cell.workload(toy)
    sizes = batch_sizes(max(1, workload.batch_size // 8), GROWTH, most=workload.batch_size * 2**12)
    found = largest_batch(
        sizes,
        lambda size: bytes_needed(training(dataclasses.replace(workload, batch_size=size), cell.how())),
        limit,
    )
    if found is None:
        raise MemoryError(f"{cell.model} {cell.name}: not even a batch of {sizes[0]} fits into {limit} bytes")
    return found
