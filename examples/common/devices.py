"""Data parallelism by `jax.sharding`: batches in equal parts over all devices, the state on each or split as well."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.common.cli import UsageError

T = TypeVar("T")


class DataParallel:
    """Where arrays live. The program stays that of one device: XLA splits it, sums gradients, and shares statistics.

    Args:
        per_process: so many devices of each process; all without it.
        fsdp: whether the state is split too, each array of floats along its longest dimension that divides evenly.
            XLA then gathers the parameters where a layer needs them, in half, and each device keeps its part of the
            gradients.

    Attributes:
        count: devices of all processes together.
        replicated, sharded: the shardings of a state and of a batch.
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
        """Raises a `UsageError` for a batch that cannot be split evenly."""
        if batch_size % self.count:
            raise UsageError(
                f"--batch-size {batch_size} cannot be divided among {self.count} devices; take a multiple of "
                f"{self.count}, or fewer --devices."
            )

    def put(self, batch: T) -> T:
        """A batch on its devices; each process gives the part that it has loaded, in the order of processes."""
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
        """A part of the state from host arrays, the same in every process."""

        def place(x: Any) -> jax.Array:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, self.of_state(x), lambda index: x[index])

        return jax.tree.map(place, tree)

    def place(self, state: T) -> T:
        """A state that was computed from another one, where `like_state` says."""
        return jax.device_put(state, jax.tree.map(self.of_state, state)) if self.fsdp else state

    def like_batch(self, batch: Any) -> Any:
        """The abstract form of a batch that all processes together have in these shapes."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharded), batch)

    def like_state(self, tree: Any) -> Any:
        """The abstract form of a state, or a part of it."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.of_state(x)), tree)
