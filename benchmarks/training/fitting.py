"""The largest batch that fits a device: XLA's memory plan says where to look, and a run says whether it is so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .cells import Cell
from .configurations import Training, training

ATTEMPTS = 5
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
    """The largest batch, within some ten percent, that a step fits with.

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
    fitting = failing = 0
    for _ in range(ATTEMPTS):
        # In steps of eight, or of what such a model is trained with: a batch is a dimension of matmuls too.
        batch_size = max(1, batch_size // 8 * 8 or batch_size)
        made, needed = at(batch_size), limit
        try:
            compiled, needed = compile_step(made, cell)
            does = fits(compiled, made)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            does = False
        fitting, failing = (batch_size, failing) if does else (fitting, batch_size)
        if fitting > SMALLER**2 * failing:
            return fitting
        # A plan can bend: what it was at the batch that failed tells more than the small ones.
        bent = (failing, max(needed, limit))
        nearer = estimate((sizes[0], planned[0]), bent, limit) if failing > sizes[0] else failing
        batch_size = (fitting + failing) // 2 if fitting else min(nearer, int(batch_size * SMALLER))
    if not fitting:
        raise MemoryError(f"{cell.model} {cell.name}: no batch near {batch_size} fits into {limit} bytes")
    return fitting
