"""Compiles cells at full size for a GPU or TPU that is not present: shapes only, no arrays.

With JAX's CUDA plugin or libtpu, XLA's compiler returns the program that would run and its memory plan. Without them,
each step is only lowered to StableHLO, the compiler's input.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import Any

import jax

from mpjax.inspection.devices import DEVICES
from mpjax.planning.target import Target, placed, traced_for
from mpjax.planning.traffic import LAUNCH, summary
from perf.environment import commit, versions
from perf.memory import program_bytes

from .cells import Cell
from .configurations import Training, training


def is_known(row: dict[str, Any], lowered: dict[str, Any], device: jax.Device | None) -> bool:
    """Whether a row is of this program and these versions; compiled, if it can be.

    Args:
        row: An earlier result of the cell.
        lowered: The same cell as it is lowered now.
        device: The device to compile for, if there is a compiler.
    """
    same = all(row.get(key) == lowered[key] for key in ("program", "versions"))
    return same and (device is None or "planned_bytes" in row)


def dry_run(
    cell: Cell, toy: bool, target: Target, device: jax.Device | None, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The results for a cell's step without running it.

    Args:
        cell, toy: The model and its configuration.
        target: The kind of device.
        device: One of them; None lowers the step without compiling it.
        known: An earlier result, which is returned if the step is lowered to the same program.
    """
    start = time.perf_counter()
    made = training(cell.workload(toy, bool(target.chips)), cell.settings())
    step = lowered(cell, made, target, device)
    text = step.as_text()
    row = {
        "batch_size": made.workload.batch_size,
        "lowered_seconds": round(time.perf_counter() - start, 1),
        "operations": text.count(" = "),
        "matmuls": text.count("stablehlo.dot_general") + text.count("stablehlo.convolution"),
        "arguments_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made.abstract()) if _is_real(x)),
        "program": hashlib.sha256(text.encode()).hexdigest()[:16],
        "versions": versions() | target.versions(),
    }
    if known and is_known(known, row, device):
        return known
    if device is None:
        return row
    start = time.perf_counter()
    compiled = step.compile()
    seconds = round(time.perf_counter() - start, 1)
    return row | {
        "compile_seconds": seconds,
        **commit(),
        "planned_bytes": program_bytes(compiled),
        **summary(compiled.as_text(), DEVICES[target.key], 0.0 if target.chips else LAUNCH),
    }


def lowered(cell: Cell, made: Training, target: Target, device: jax.Device | None) -> Any:
    """A cell's step, lowered for a device, or for any of its kind."""
    shapes = made.abstract()
    traced: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if device is not None:
        shapes, traced = placed(shapes, jax.sharding.SingleDeviceSharding(device)), traced_for(device)
    with cell.settings().context(), traced:
        step: Any = jax.jit(made.step, donate_argnums=0, compiler_options=_options(cell, target))
        return step.trace(*shapes).lower(lowering_platforms=(target.platform,))


def _options(cell: Cell, target: Target) -> dict[str, bool | int | str]:
    """Without autotuning, XLA would widen float8 operands in a Triton kernel."""
    untuned = cell.settings().float8 and target.platform == "cuda"
    return {"xla_gpu_enable_triton_gemm": False} if untuned else {}


def _is_real(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
