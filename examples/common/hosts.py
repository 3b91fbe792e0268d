"""Several processes of one run: `jax.distributed`, who writes, and what all of them agree on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from examples.common.cli import UsageError

# Without a sign of life from another process for so long, the others end; they would wait forever.
_HEARTBEAT_SECONDS = 20


def connect(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a run, before anything else of JAX is used; without a flag there is one process.

    Args:
        coordinator: `HOST:PORT` of process 0; a cluster that JAX knows (Slurm, TPU pods) needs no more than
            `"auto"`.
        processes, process_id: how many there are, and which of them this is.

    Raises:
        UsageError: flags that do not go together, or no connection.
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
    """Whether an error of JAX says that another process is gone: by Gloo (CPU), NCCL (GPU) or JAX's own service."""
    signs = ("Gloo", "NCCL", "nccl", "CoordinationService", "UNAVAILABLE")
    return jax.process_count() > 1 and any(sign in str(error) for sign in signs)


def is_main() -> bool:
    """Whether this process is the one that prints and writes files."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints, on one of the processes."""
    if is_main():
        print(text, flush=True)


def on_any(*flags: bool) -> tuple[bool, ...]:
    """For each flag whether it is set in any process. All of them must call this at the same place."""
    if jax.process_count() == 1:
        return flags
    return tuple(bool(x) for x in multihost_utils.process_allgather(np.array(flags)).any(axis=0))


def on_host(tree: Any) -> Any:
    """The arrays as NumPy's, whole, also where other processes hold parts. All of them must call this."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True)), tree)


def wait_for_all(name: str) -> None:
    """Returns when every process has come to the place of that name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
