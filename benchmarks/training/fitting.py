"""The largest batch that fits a device: XLA's memory plan says where to look, and a run says whether it is so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .cells import Cell
from .configurations import Training, training

ATTEMPTS = 4
SMALLER = 0.95


def estimate(small: tuple[int, int], large: tuple[int, int], limit: int) -> int:
    """The batch at which a line through two (batch, bytes) pairs reaches `limit` bytes."""
    slope = (large[1] - small[1]) / (large[0] - small[0])
    return int(small[0] + (limit - small[1]) / slope)


def largest_batch(
    cell: Cell,
    toy: bool,
    limit: int,
    compile_step: Callable[[Training, Cell], tuple[Any, int]],
    fits: Callable[[Any, Training], bool],
) -> int:
    """The largest batch, within some five percent, that a step fits with.

    Args:
        cell, toy: the model and its configuration.
        limit: bytes of the device.
        compile_step: gives a compiled step and the bytes that it is planned to take.
        fits: whether it does; it may raise where memory does not suffice, as `compile_step` may.
    """
    workload = cell.workload(toy)

    def at(batch_size: int) -> Training:
        return training(dataclasses.replace(workload, batch_size=batch_size), cell.how())

    sizes = workload.batch_size, 2 * workload.batch_size
    planned = [compile_step(at(size), cell)[1] for size in sizes]
    batch_size = estimate((sizes[0], planned[0]), (sizes[1], planned[1]), limit)
    for _ in range(ATTEMPTS):
        # In steps of eight, or of what such a model is trained with: a batch is a dimension of matmuls too.
        batch_size = max(1, batch_size // 8 * 8 or batch_size)
        made, needed = at(batch_size), limit
        try:
            compiled, needed = compile_step(made, cell)
            if fits(compiled, made):
                return batch_size
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        nearer = estimate((sizes[0], planned[0]), (batch_size, max(needed, limit)), limit)
        batch_size = min(nearer, int(batch_size * SMALLER))
    raise MemoryError(f"{cell.model} {cell.name}: no batch near {batch_size} fits into {limit} bytes")
