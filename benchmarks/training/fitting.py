"""The largest batch of a cell that fits a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from perf.memory import batch_sizes, largest_batch

from .cells import Cell
from .configurations import Training, training

GROWTH = 1.06  # ratio of neighbouring candidate batch sizes


def largest_batch_of(cell: Cell, toy: bool, limit: int, bytes_needed: Callable[[Training], int]) -> int:
    """The largest batch, within about six percent, with which a step fits.

    Args:
        cell, toy: The model and its configuration.
        limit: Memory of the device in bytes.
        bytes_needed: Compiles a step, runs it if there is a device, and returns the bytes of its plan. It may raise if
            memory does not suffice.

    Raises:
        MemoryError: Not even an eighth of the model's batch fits.
    """
    workload = cell.workload(toy)
    sizes = batch_sizes(max(1, workload.batch_size // 8), GROWTH, most=workload.batch_size * 2**12)
    found = largest_batch(
        sizes,
        lambda size: bytes_needed(training(dataclasses.replace(workload, batch_size=size), cell.settings())),
        limit,
    )
    if found is None:
        raise MemoryError(f"{cell.model} {cell.name}: not even a batch of {sizes[0]} fits into {limit} bytes")
    return found
