"""A model as `benchmarks.training` runs it: its module, a batch, the loss and the optimizer."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

Batch = dict[str, jax.Array]
WORKLOADS: dict[str, Workload] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(abc.ABC):
    """A model at its published sizes, which are the fields of a subclass.

    No model has dropout: its random bits cost the same in every precision, and differ between frameworks.
    """

    batch_size: int
    examples: ClassVar[str]
    toy_sizes: ClassVar[dict[str, Any]]
    shallow_sizes: ClassVar[dict[str, Any]]
    # The speedup over float32 that others report for such models; None if nobody does.
    reported_speedup: ClassVar[float | None] = None
    in_torch: ClassVar[bool] = True  # whether `benchmarks.torch_models` has it

    @abc.abstractmethod
    def module(self, dtype: Any = None) -> nn.Module:
        """The Flax model; with a dtype, its hand-written half precision form."""

    @abc.abstractmethod
    def batch(self, key: jax.Array) -> Batch:
        """Synthetic inputs and labels; the leading axis of each array is the batch."""

    @abc.abstractmethod
    def inputs(self, batch: Batch) -> tuple[jax.Array, ...]:
        """The arrays of a batch that the module is called with."""

    @abc.abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> jax.Array:
        """The loss, a float32 scalar; computed in float32, as hand-written half models do."""

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(1e-4)

    def toy(self) -> Self:
        """The same model, so small that a step takes milliseconds on a CPU."""
        return dataclasses.replace(self, **self.toy_sizes)

    def shallow(self) -> Self:
        """The same model with fewer layers: its float32 form fits into one TPU chip, and compiles in a minute.

        A vocabulary is smaller in proportion, so that its embeddings take their share of the step.
        """
        return dataclasses.replace(self, **self.shallow_sizes)


def register(name: str, workload: Workload) -> None:
    """Adds a model to the benchmark."""
    if name in WORKLOADS:
        raise ValueError(f"two models of the benchmark are named {name!r}")
    WORKLOADS[name] = workload


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean negative log likelihood, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
