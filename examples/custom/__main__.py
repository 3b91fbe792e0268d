"""`python -m examples.custom`: a custom model and dataset in the training loop of the other scripts; copy this file.

It has the flags that all scripts share: `--policy`, `--resume`, `--init-from`, `--export`, `--audit`, ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from examples.common import modes
from examples.common.config import RunConfig
from examples.common.optimizers import Recipe
from examples.common.task import Task
from examples.common.training import DataParallel, Loss, Model, Variables, masked_sums, means


class Batch(NamedTuple):
    """Measurements of tumours, and whether each is benign."""

    inputs: Any  # [batch, 30], float32
    labels: Any  # [batch], int32


class Net(nn.Module):
    """The model. It contains nothing about precision."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (64, 64):
            x = nn.LayerNorm()(nn.gelu(nn.Dense(features)(x)))
        return nn.Dense(2)(x)


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Trains a small network on the breast cancer data inside scikit-learn."""

    script = "custom"
    unit = "tumours"
    mode = "train_and_evaluate"

    @property
    def recipe_defaults(self) -> Recipe:
        return Recipe(20, 32, learning_rate=3e-3, warmup_epochs=1, optimizer="adamw", weight_decay=1e-2)


class CustomTask(Task):
    """The model and its data, as the training loop requires them."""

    config_type, unit, title = Config, "tumours", "tumours"
    metric, metric_name, table = ("test_accuracy", 1), "test accuracy", {"test_accuracy": "test accuracy"}

    def __init__(self, config: Config, parallel: DataParallel, data: tuple[Batch, Batch]) -> None:
        super().__init__(config, parallel, data)
        self._train, self._test = data
        self.steps, self.test_count = len(self._train.labels) // self.batch_size, len(self._test.labels)
        self._test_loss = jax.jit(self.model().loss)  # once: every call of jax.jit would recompile

    @classmethod
    def open(cls, config: Config, description: dict[str, Any] | None = None) -> tuple[Batch, Batch]:
        from sklearn.datasets import load_breast_cancer
        from sklearn.model_selection import train_test_split

        inputs, labels = load_breast_cancer(return_X_y=True)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        split = train_test_split(inputs.astype(np.float32), labels.astype(np.int32), test_size=0.25, random_state=0)
        return Batch(*split[::2]), Batch(*split[1::2])

    def model(self) -> Model:
        config = self.config
        policy = mpjax.get_policy(config.policy)
        net = mpjax.with_policy(Net(), policy) if config.amp == "module" else Net()
        apply: Callable[..., Any] = net.apply if config.amp == "module" else mpjax.autocast(net.apply, policy)

        def loss(variables: Variables, batch: Batch, key: jax.Array) -> Loss:
            logits = apply({"params": variables.params}, batch.inputs).astype(jnp.float32)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            correct = (jnp.argmax(logits, axis=-1) == batch.labels).astype(jnp.float32)
            sums = masked_sums(jnp.ones(len(losses)), loss=losses, accuracy=correct)
            return Loss(jnp.mean(losses), sums, variables.stats)

        def init(key: jax.Array) -> Variables:
            return Variables(net.init(key, jnp.zeros((1, 30)))["params"], {})

        return Model(init, loss, sums=("loss", "accuracy", "count"))

    def example_batches(self, batch_size: int) -> Sequence[Batch]:
        return [Batch(np.zeros((batch_size, 30), np.float32), np.zeros(batch_size, np.int32))]

    def synthetic_batch(self) -> Batch:
        return self.example_batches(self.batch_size)[0]

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self._train.labels))
        for batch in range(first, self.steps):
            chosen = order[batch * self.batch_size :][: self.batch_size]
            yield Batch(*(x[chosen] for x in self._train))

    def test(self, weights: Variables, between_steps: Callable[[], None], *, last: bool = True) -> dict[str, Any]:
        between_steps()
        result = self._test_loss(weights, self._test, jax.random.key(0))
        return {f"test_{name}": value for name, value in means(result.sums).items()}


main = functools.partial(modes.main, CustomTask)

if __name__ == "__main__":
    raise SystemExit(main())
