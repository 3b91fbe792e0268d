"""Data parallelism with `jax.sharding`: batches are split over all devices, the state is replicated or split."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
