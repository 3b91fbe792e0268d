"""Compiles cells at full size for an H200 without a GPU: shapes only, no arrays.

With JAX's CUDA plugin, XLA's GPU compiler returns the program that would run and its memory plan. Without the plugin,
each step is only lowered to StableHLO, the compiler's input.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from mpjax.inspection.devices import DEVICES
from perf.environment import versions
from perf.memory import program_bytes

from .cells import Cell
from .compiling import jitted
from .configurations import Training, training
from .fitting import largest_batch_of
from .target import MEMORY_BYTES, placed
from .traffic import summary
from .worker import shortened

Target = jax.sharding.Sharding | None


def is_known(row: dict[str, Any], target: Target) -> bool:
    """Whether a cell was compiled with these versions, or lowered if it cannot be compiled."""
    return row.get("versions") == versions() and (target is None or "planned_bytes" in row)


def dry_run(cell: Cell, toy: bool, target: Target) -> dict[str, Any]:
    """The results for a cell's step without running it.

    Args:
        cell, toy: The model and its configuration.
        target: The result of `target.h200`; None lowers the step without compiling it.
    """
    start = time.perf_counter()
    made = training(cell.workload(toy), cell.settings())
    lowered = _lowered(cell, made, target)
    text = lowered.as_text()
    row = {
        "batch_size": made.workload.batch_size,
        "lowered_seconds": round(time.perf_counter() - start, 1),
        "operations": text.count(" = "),
        "matmuls": text.count("stablehlo.dot_general") + text.count("stablehlo.convolution"),
        "arguments_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made.abstract()) if _is_real(x)),
        "versions": versions(),
    }
    if target is None:
        return row
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = round(time.perf_counter() - start, 1)
    return row | {
        "compile_seconds": seconds,
        "planned_bytes": program_bytes(compiled),
        **summary(compiled.as_text(), DEVICES["H200"]),
    }


def fitting_batch(cell: Cell, toy: bool, target: Target) -> dict[str, Any]:
    """The largest batch whose plan fits into the memory of an H200."""

    def bytes_needed(made: Training) -> int:
        return program_bytes(_lowered(cell, made, target).compile())

    try:
        return {
            "largest_batch": largest_batch_of(cell, toy, MEMORY_BYTES, bytes_needed),
            "largest_batch_error": None,
        }
    except Exception as error:  # the cell's earlier results remain valid
        return {"largest_batch": None, "largest_batch_error": shortened(error)}


def _lowered(cell: Cell, made: Training, target: Target) -> Any:
    shapes = made.abstract() if target is None else placed(made.abstract(), target)
    with cell.settings().context():
        return jitted(cell, made).trace(*shapes).lower(lowering_platforms=("cuda",))


def _is_real(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
