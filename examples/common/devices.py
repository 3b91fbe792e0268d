"""Data parallelism with `jax.sharding` over devices and processes: batches are split, the state is copied or split."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from examples.common.cli import UsageError

T = TypeVar("T")


class DataParallel:
    """Placement of arrays. The program is written for one device. XLA splits it, sums gradients and shares statistics.

    Args:
        per_process: Number of devices of each process; None for all.
        fsdp: Whether to split the state too, each floating array along its longest evenly divisible dimension. XLA then
            gathers the parameters in half where a layer needs them, and each device keeps its part of the gradients.

    Attributes:
        count: Number of devices of all processes.
        replicated, sharded: The shardings of a state and of a batch.
    """

    def __init__(self, per_process: int | None = None, fsdp: bool = False) -> None:
        local = jax.local_device_count()
        if per_process is not None and not 1 <= per_process <= local:
            raise UsageError(f"--devices {per_process}: this machine has {local}; give 1 to {local}, or leave it out.")
        processes = range(jax.process_count())
        chosen = [device for process in processes for device in jax.local_devices(process)[:per_process]]
        self.count, self.fsdp = len(chosen), fsdp
        mesh = Mesh(np.array(chosen), ("data",))
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.sharded = NamedSharding(mesh, PartitionSpec("data"))

    def check(self, batch_size: int) -> None:
        """Raises a `UsageError` if a batch cannot be split evenly."""
        if batch_size % self.count:
            raise UsageError(
                f"--batch-size {batch_size} cannot be divided among {self.count} devices; use a multiple of "
                f"{self.count}, or fewer --devices."
            )

    def put(self, batch: T) -> T:
        """Puts a batch on its devices. Each process passes the part that it loaded, in the order of processes."""
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self.sharded, np.asarray(x)), batch)

    def of_state(self, x: Any) -> NamedSharding:
        """The sharding of an array of the state."""
        splits = self.fsdp and jnp.issubdtype(x.dtype, jnp.floating)
        even = [d for d, size in enumerate(x.shape) if size and size % self.count == 0] if splits else []
        if not even:
            return self.replicated
        longest = max(even, key=lambda d: x.shape[d])
        return NamedSharding(
            self.replicated.mesh, PartitionSpec(*("data" if d == longest else None for d in range(x.ndim)))
        )

    def replicate(self, tree: T) -> T:
        """Places a part of the state from host arrays, which must be equal in all processes."""

        def place(x: Any) -> jax.Array:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, self.of_state(x), lambda index: x[index])

        return jax.tree.map(place, tree)

    def place(self, state: T) -> T:
        """Moves a computed state to the shardings of `like_state`."""
        return jax.device_put(state, jax.tree.map(self.of_state, state)) if self.fsdp else state

    def like_batch(self, batch: Any) -> Any:
        """The abstract form of a batch whose shapes are those of all processes together."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharded), batch)

    def like_state(self, tree: Any) -> Any:
        """The abstract form of a state, or a part of it."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.of_state(x)), tree)


# Runs with several processes: `jax.distributed`, output from the main process, and joint decisions.

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
    """Prints on the main process only, above a progress bar."""
    if is_main():
        tqdm.write(text)
        sys.stdout.flush()


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
