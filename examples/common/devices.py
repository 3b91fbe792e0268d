"""Data parallelism over the devices of this machine: batches are split, the state is copied or split."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from examples.common.cli import UsageError

T = TypeVar("T")


class DataParallel:
    """Placement of arrays. The program is written for one device. XLA splits it, sums gradients and shares statistics.

    Args:
        devices: Number of devices; None for all.
        fsdp: Whether to split the state too, each floating array along its longest evenly divisible dimension. XLA then
            gathers the parameters in half where a layer needs them, and each device keeps its part of the gradients.

    Attributes:
        count: Number of devices.
        replicated, sharded: The shardings of a state and of a batch.
    """

    def __init__(self, devices: int | None = None, fsdp: bool = False) -> None:
        there = jax.device_count()
        if devices is not None and not 1 <= devices <= there:
            raise UsageError(f"--devices {devices}: this machine has {there}; give 1 to {there}, or leave it out.")
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
        self.count, self.fsdp = mesh.size, fsdp
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
        """Puts a batch on its devices."""
        return jax.device_put(batch, self.sharded)

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
        """Places a part of the state from host arrays."""
        return jax.tree.map(lambda x: jax.device_put(np.asarray(x), self.of_state(np.asarray(x))), tree)

    def place(self, state: T) -> T:
        """Moves a computed state to the shardings of `like_state`."""
        return jax.device_put(state, jax.tree.map(self.of_state, state)) if self.fsdp else state

    def like_batch(self, batch: Any) -> Any:
        """The abstract form of a batch."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharded), batch)

    def like_state(self, tree: Any) -> Any:
        """The abstract form of a state, or a part of it."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.of_state(x)), tree)


def say(text: str) -> None:
    """Prints above a progress bar."""
    tqdm.write(text)
    sys.stdout.flush()
