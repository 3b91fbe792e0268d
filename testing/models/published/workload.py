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
# The sizes of the toy models, by the names of a workload's fields.
TOY_SIZES: dict[str, Any] = {
    "batch_size": 2,
    "layers": 2,
    "stages": (1, 1),
    "features": 32,
    "hidden": 64,
    "heads": 2,
    "width": 8,
    "widths": (16, 8),
    "channels": 4,
    "factors": 8,
    "length": 16,
    "target": 8,
    "masked": 4,
    "frames": 32,
    "frequencies": 16,
    "label_length": 4,
    "side": 32,
    "vocabulary": 64,
    "classes": 16,
    "users": 32,
    "items": 16,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload(abc.ABC):
    """A model at its published sizes, which are the fields of a subclass.

    No model has dropout: its random bits cost the same in every precision.

    Attributes:
        model: The class of the Flax model, whose fields are those of the same names and `dtype`.
        arguments: The arrays of a batch that the model is called with.
    """

    batch_size: int
    model: ClassVar[type[nn.Module]]
    arguments: ClassVar[tuple[str, ...]]
    shallow_sizes: ClassVar[dict[str, Any]] = {}

    def module(self, dtype: Any = None) -> nn.Module:
        """The Flax model; with a dtype, its hand-written half precision form."""
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields: Any = dataclasses.fields(self.model)
        return self.model(**{f.name: sizes[f.name] for f in fields if f.name in sizes}, dtype=dtype)

    @abc.abstractmethod
    def batch(self, key: jax.Array) -> Batch:
        """Synthetic inputs and labels; the leading axis of each array is the batch."""

    def inputs(self, batch: Batch) -> tuple[jax.Array, ...]:
        """The arrays of a batch that the module is called with."""
        return tuple(batch[name] for name in self.arguments)

    def loss(self, outputs: Any, batch: Batch) -> jax.Array:
        """The loss, a float32 scalar; computed in float32, as hand-written half models do."""
        return cross_entropy(outputs, batch["labels"])

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(1e-4)

    def toy(self) -> Self:
        """The same model, so small that a step takes milliseconds on a CPU."""
        fields = [field.name for field in dataclasses.fields(self)]
        return dataclasses.replace(self, **{name: size for name, size in TOY_SIZES.items() if name in fields})

    def shallow(self) -> Self:
        """The same model with fewer layers: its float32 form fits into one TPU chip, and compiles in a minute.

        A vocabulary is smaller in proportion, so that its embeddings take their share of the step.
        """
        return dataclasses.replace(self, **self.shallow_sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageWorkload(Workload):
    """A classifier of images, by default at ImageNet's sizes."""

    side: int = 224
    classes: int = 1000
    arguments = ("images",)

    def batch(self, key: jax.Array) -> Batch:
        images, labels = jax.random.split(key)
        return {
            "images": jax.random.normal(images, (self.batch_size, self.side, self.side, 3)),
            "labels": jax.random.randint(labels, (self.batch_size,), 0, self.classes),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerWorkload(Workload):
    """The sizes of the blocks, and how they are run."""

    features: int
    layers: int
    heads: int
    remat: bool = False
    loop: bool = False
    fused: Any = None


class TextWorkload(Workload):
    """Predicts the next token of each."""

    length: int
    vocabulary: int
    arguments = ("tokens",)

    def batch(self, key: jax.Array) -> Batch:
        text = jax.random.randint(key, (self.batch_size, self.length + 1), 0, self.vocabulary)
        return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def register(name: str, workload: Workload) -> None:
    """Adds a model to the benchmark."""
    if name in WORKLOADS:
        raise ValueError(f"two models of the benchmark are named {name!r}")
    WORKLOADS[name] = workload


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean negative log likelihood, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
