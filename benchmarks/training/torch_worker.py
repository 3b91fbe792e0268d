"""Measures cells of PyTorch: `python -m benchmarks.training.torch_worker MODEL CELL...`, a line of JSON for each.

JAX makes the batches on the host, so they equal those of the JAX cells.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from benchmarks.models import Workload
from benchmarks.torch_models import MODELS

from .cells import Cell
from .worker import emit, seconds_per_step, shortened

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class TorchConfiguration:
    """A way to train in PyTorch; `half` is the dtype of `torch.autocast`."""

    half: torch.dtype | None = None
    tf32: bool = True
    compiled: bool = False


CONFIGURATIONS = {
    "torch_float32": TorchConfiguration(tf32=False),
    "torch_tf32": TorchConfiguration(),
    "torch_amp_float16": TorchConfiguration(torch.float16),
    "torch_amp_bfloat16": TorchConfiguration(torch.bfloat16),
    "torch_compiled_amp_float16": TorchConfiguration(torch.float16, compiled=True),
    "torch_compiled_amp_bfloat16": TorchConfiguration(torch.bfloat16, compiled=True),
}


def make_step(workload: Workload, config: TorchConfiguration) -> Callable[[dict[str, Any]], torch.Tensor]:
    """A training step as in PyTorch's AMP examples."""
    model = MODELS[type(workload)]
    module = model.build(workload).to(DEVICE)
    if model.channels_last and config.half is not None:
        module = module.to(memory_format=torch.channels_last)
    parameters = list(module.parameters())
    fused = {"fused": True} if DEVICE == "cuda" else {}
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-4, **fused)
    if workload.examples == "images":
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **fused)
    scaler = torch.amp.GradScaler(DEVICE, enabled=config.half is torch.float16)
    compiled = torch.compile(module) if config.compiled else module

    def step(batch: dict[str, Any]) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        casting = torch.autocast(DEVICE, config.half) if config.half is not None else contextlib.nullcontext()
        with casting:
            loss = model.loss(compiled, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def tensors(workload: Workload) -> dict[str, torch.Tensor]:
    """A batch; PyTorch's embeddings and losses need 64-bit integers."""
    arrays = {name: np.asarray(x) for name, x in workload.batch(jax.random.key(1)).items()}
    wide = {name: x.astype(np.int64) if np.issubdtype(x.dtype, np.integer) else x for name, x in arrays.items()}
    return {name: torch.tensor(x, device=DEVICE) for name, x in wide.items()}


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(cell: Cell, toy: bool, seconds: float) -> dict[str, Any]:
    """Runs a cell and returns its results."""
    config = CONFIGURATIONS[cell.configuration]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    torch.backends.cudnn.benchmark = True
    workload = cell.workload(toy)
    batch = tensors(workload)
    step = make_step(workload, config)
    losses: list[float] = []

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = step(batch)
        wait()
        losses.append(float(loss))

    start = time.perf_counter()
    run(1)
    first = time.perf_counter() - start
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = seconds_per_step(run, seconds)
    median = statistics.median(times)
    return {
        "batch_size": workload.batch_size,
        "examples_per_second": round(workload.batch_size / median, 2),
        "milliseconds": round(median * 1e3, 4),
        "milliseconds_spread": [round(min(times) * 1e3, 4), round(max(times) * 1e3, 4)],
        "peak_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None,
        "finite_loss": bool(np.isfinite(losses[0])),
        **({"compile_seconds": round(first - median, 2)} if config.compiled else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("cells", nargs="*")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    for name in args.cells:
        try:
            row = measure(Cell.parse(args.model, name), args.toy, args.seconds)
        except Exception as error:  # a cell's error is its result
            row = {"error": shortened(error)}
        emit(name, row | {"versions": {"torch": torch.__version__}})


if __name__ == "__main__":
    main()
