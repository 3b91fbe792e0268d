"""The parts of a model family of the parity suite: float32 models, data, loss, metric, hyperparameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

Batch = Any  # a pytree of arrays; for most families a dict
MODEL = "model"  # the name of a family's only model
STATISTICS = "batch_stats"


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a family with their variables: `models["model"](x)` calls one."""

    applies: Mapping[str, Callable[..., Any]]
    variables: Mapping[str, Any]

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.applies[name](self.variables[name], *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the only model."""
        return self[MODEL](*args, **kwargs)

    def training(self, *args: Any, name: str = MODEL) -> tuple[Any, Any]:
        """The outputs of a model in training mode, and its new variables."""
        return self[name](*args, train=True, mutable=[STATISTICS])


Loss = Callable[[Models, Batch], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One small training task, independent of precision.

    Attributes:
        name: The displayed name.
        data: A description of the data, their source and their licence.
        metric: Name of the held-out metric.
        larger_is_better: Whether larger values of the metric are better.
        modules: The models by name; most families have one, named "model".
        losses: For each trained model, in order: maps models and a batch to the loss and the model's new
            variables that are not parameters (batch statistics).
        example: Maps a batch to the arguments that initialise each model.
        batch: Draws a training batch.
        test: Draws the held-out data, which `held_out` keeps.
        predict: Maps models and the held-out data to the inputs of `score`; runs under the policy.
        score: Maps predictions and the held-out data to the metric; in NumPy, outside the policy.
        optimizer: The optimizer of each model, for a number of updates.
        steps: Number of steps of a training.
        prepare: Processes a step's batch before the update (rollouts, generated samples); runs under the policy.
        passes: Number of updates on each prepared batch.
    """

    name: str
    data: str
    metric: str
    larger_is_better: bool = True
    modules: Mapping[str, nn.Module]
    losses: Mapping[str, Loss]
    example: Callable[[Batch], Mapping[str, tuple[Any, ...]]]
    batch: Callable[[np.random.Generator], Batch]
    test: Callable[[], Batch]
    predict: Callable[[Models, Batch], Any]
    score: Callable[[Any, Batch], float]
    optimizer: Callable[[int], optax.GradientTransformation]
    steps: int
    prepare: Callable[[Models, Batch], Batch] | None = None
    passes: int = 1

    @functools.cached_property
    def held_out(self) -> Batch:
        """The held-out data."""
        return self.test()


def adam(peak: float, clip: float | None = None) -> Callable[[int], optax.GradientTransformation]:
    """Adam with a short warm-up and a cosine decay to zero."""

    def optimizer(updates: int) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(updates // 20, 1), updates)
        chain = [] if clip is None else [optax.clip_by_global_norm(clip)]
        return optax.flatten(optax.chain(*chain, optax.adam(schedule)))

    return optimizer


def stateless(loss: Callable[[Models, Batch], jax.Array]) -> Loss:
    """The loss of models without batch statistics."""
    return lambda models, batch: (loss(models, batch), {})


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def draw(rng: np.random.Generator, data: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Random rows of arrays of equal length."""
    rows = rng.integers(len(next(iter(data.values()))), size=size)
    return {name: values[rows] for name, values in data.items()}


def split(data: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random rows of arrays of equal length: seven of ten to train, the rest held out."""
    order = np.random.default_rng(0).permutation(len(next(iter(data.values()))))
    parts = np.split(order, [len(order) * 7 // 10])
    train, held_out = ({name: values[rows] for name, values in data.items()} for rows in parts)
    return train, held_out


def accuracy(predicted: np.ndarray, test: Mapping[str, np.ndarray]) -> float:
    """Percentage of predicted classes that equal the labels."""
    return 100 * float(np.mean(np.asarray(predicted) == test["label"]))


def as_float(value: Any, test: Batch) -> float:
    """A metric that `predict` has already computed."""
    return float(value)


def classify_images(models: Models, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    """The loss of an image classifier with batch statistics."""
    logits, updated = models.training(batch["image"])
    return cross_entropy(logits, batch["label"]), updated


def classes_of_images(models: Models, test: Mapping[str, jax.Array]) -> jax.Array:
    """The classes that an image classifier predicts."""
    return jnp.argmax(models(test["image"], train=False), -1)
