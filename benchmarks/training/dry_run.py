"""Compiles cells abstractly, at full size and for CUDA, where there is no GPU: shapes only, no arrays.

XLA's GPU compiler needs a GPU's driver; what comes before it does not. So every step is traced, differentiated and
lowered to the StableHLO that a GPU would be given, which shows all but what XLA makes of it.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from .cells import Cell
from .configurations import training
from .worker import shortened


def dry_run(cell: Cell, toy: bool) -> dict[str, Any]:
    """Lowers a cell's step for CUDA; how long it took and how large the program is, or what it fails with."""
    start = time.perf_counter()
    made = training(cell.workload(toy), cell.how())
    step = jax.jit(made.step, donate_argnums=0)
    try:
        with cell.how().context():
            lowered = step.trace(*made.abstract()).lower(lowering_platforms=("cuda",))
    except Exception as error:
        return {"error": shortened(error)}
    text = lowered.as_text()
    return {
        "lowered_seconds": round(time.perf_counter() - start, 1),
        "operations": text.count(" = "),
        "matmuls": text.count("stablehlo.dot_general") + text.count("stablehlo.convolution"),
        "arguments_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made.abstract()) if _is_real(x)),
    }


def _is_real(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
