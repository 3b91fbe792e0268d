"""Runs with several processes: `jax.distributed`, output from the main process, and joint decisions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples.common.cli import UsageError

# If a process sends no heartbeat for this long, the others end. Otherwise they would wait forever.
_HEARTBEAT_SECONDS = 20


def connect(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run. Call it before any other use of JAX. Without flags there is one process.

    Args:
        coordinator: `HOST:PORT` of process 0, or `"auto"` on a cluster that JAX knows (Slurm, TPU pods).
        processes, process_id: Number of processes, and the index of this one.

    Raises:
        UsageError: The flags are inconsistent, or the connection fails.
    """
    if coordinator is None:
        if processes is not None or process_id is not None:
            raise UsageError("--processes and --process-id need --coordinator HOST:PORT, the address of process 0.")
        return
    try:
        if coordinator == "auto":
            jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
            return
        if processes is None or process_id is None or not 0 <= process_id < processes:
            raise UsageError(
                f"--coordinator {coordinator} needs --processes N and --process-id 0 ... N-1, "
                f"got --processes {processes} and --process-id {process_id}."
            )
        jax.distributed.initialize(coordinator, processes, process_id, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"--coordinator {coordinator}: the processes cannot be joined: {error}") from error


class PeerLostError(UsageError):
    """Another process of the run has ended."""


def peer_lost(error: Exception) -> bool:
    """Whether an error of Gloo (CPU), NCCL (GPU) or JAX's coordination service means that another process has ended."""
    signs = ("Gloo", "NCCL", "nccl", "CoordinationService", "UNAVAILABLE")
    return jax.process_count() > 1 and any(sign in str(error) for sign in signs)


def is_main() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints on the main process only."""
    if is_main():
        print(text, flush=True)


def on_any_process(*flags: bool) -> tuple[bool, ...]:
    """For each flag, whether it is set in any process. All processes must call this at the same point."""
    if jax.process_count() == 1:
        return flags
    return tuple(bool(x) for x in multihost_utils.process_allgather(np.array(flags)).any(axis=0))


def gather_to_host(tree: Any) -> Any:
    """Gathers whole arrays as NumPy arrays, including parts that other processes hold. All processes must call this."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)


def wait_for_all(name: str) -> None:
    """Waits until every process has called this with the same name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
