"""Measures cells of JAX: `python -m benchmarks.training.worker MODEL CELL...`, a line of JSON for each.

On a GPU a process measures one cell, because peak memory and out-of-memory errors concern the whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from perf.environment import commit, environment, versions
from perf.memory import peak_bytes, program_bytes

from .cells import Cell
from .configurations import training

WARM_UP = 3
BLOCKS = 5
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def seconds_per_step(run: Callable[[int], Any], seconds: float) -> list[float]:
    """Seconds per step in each of several blocks that take `seconds` in total; `run(n)` runs n steps and waits."""
    run(WARM_UP)
    start = time.perf_counter()
    run(1)
    steps = max(1, round(seconds / BLOCKS / max(time.perf_counter() - start, 1e-6)))
    times = []
    for _ in range(BLOCKS):
        start = time.perf_counter()
        run(steps)
        times.append((time.perf_counter() - start) / steps)
    return times


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """Collects the compilations that came from the persistent cache."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == _CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)


def measure(cell: Cell, toy: bool, seconds: float, profile: bool) -> dict[str, Any]:
    """Runs a cell and returns its results."""
    made = training(cell.workload(toy), cell.settings())
    step: Any = jax.jit(made.step, donate_argnums=0)
    with cell.settings().context():
        start = time.perf_counter()
        lowered = step.lower(*made.abstract())
        traced = time.perf_counter()
        with cache_hits() as hits:
            compiled = lowered.compile()
        done = time.perf_counter()
        carry, batch = jax.jit(made.init)(jax.random.key(0)), jax.jit(made.workload.batch)(jax.random.key(1))

    losses: list[jax.Array] = []

    def run(steps: int) -> None:
        nonlocal carry
        for _ in range(steps):
            carry, loss = compiled(carry, batch)
        losses.append(jax.block_until_ready(loss))

    times = seconds_per_step(run, seconds)
    median = statistics.median(times)
    row: dict[str, Any] = {
        "batch_size": made.workload.batch_size,
        "examples_per_second": round(made.workload.batch_size / median, 2),
        "milliseconds": round(median * 1e3, 4),
        "milliseconds_spread": [round(min(times) * 1e3, 4), round(max(times) * 1e3, 4)],
        "trace_seconds": round(traced - start, 2),
        "peak_bytes": peak_bytes(),
        "planned_bytes": program_bytes(compiled),
        "finite_loss": bool(jnp.isfinite(losses[0])),
        # A cache hit does not measure compilation, so the row keeps an earlier measurement.
        **({} if hits else {"compile_seconds": round(done - traced, 2)}),
    }
    # The profiler copies donated arguments, for which memory may not suffice.
    if profile:
        try:
            with cell.settings().context():
                row["tensor_core_share"] = mpjax.profile(step, carry, batch, steps=3, carry=1).tensor_core_share
        except Exception as error:
            row["profile_error"] = shortened(error)
    return row


def matmul_peak(side: int) -> dict[str, float]:
    """FLOP/s of a square half matmul, the practical limit of the Tensor Cores."""
    peaks = {}
    for dtype in ("float16", "bfloat16"):
        a = jnp.ones((side, side), dtype)
        compiled = jax.jit(jnp.matmul).lower(a, a).compile()

        def run(steps: int, compiled: Any = compiled, a: jax.Array = a) -> None:
            for _ in range(steps):
                out = compiled(a, a)
            jax.block_until_ready(out)

        peaks[dtype] = 2 * side**3 / statistics.median(seconds_per_step(run, 1.0))
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("cells", nargs="*")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.model == "matmul_peak":
        side = 512 if args.toy else 8192
        # On a CPU the large matmul takes minutes and its speed is not needed.
        peak = matmul_peak(side) if args.toy or jax.default_backend() == "gpu" else {}
        emit("matmul_peak", {"side": side, **peak, "environment": environment()})
        return
    for name in args.cells:
        cell = Cell.parse(args.model, name)
        try:
            row = measure(cell, args.toy, args.seconds, args.profile)
        except Exception as error:  # a cell's error is its result
            row = {"error": shortened(error)}
        emit(name, row | {"versions": versions(), **commit()})


def shortened(error: Exception) -> str:
    """An error's type and the first line of its message."""
    return f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])[:300]}"


def emit(name: str, row: dict[str, Any]) -> None:
    """One result on standard output, for the process that started this one."""
    print(json.dumps({"cell": name, "row": row}), flush=True)


if __name__ == "__main__":
    main()
