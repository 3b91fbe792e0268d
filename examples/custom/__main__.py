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
from examples.common import modes, training
from examples.common.config import RunConfig
from examples.common.task import Task
from examples.common.training import DataParallel, Model, Sums, TrainState, Variables


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
    without = ("mode", "weights", "best", "warmup_steps", "num_iter", "workers")  # of other modes, and of loading files

    @property
    def recipe_defaults(self) -> dict[str, Any]:
        size = {"epochs": 20, "batch_size": 32, "learning_rate": 3e-3, "warmup_epochs": 1.0}
        return {**size, "optimizer": "adamw", "weight_decay": 1e-2}


class CustomTask(Task):
    """The model and its data, as the training loop requires them."""

    config_type, unit, title = Config, "tumours", "tumours"
    metric, metric_name, table = ("test_accuracy", 1), "test accuracy", {"test_accuracy": "test accuracy"}

    def __init__(self, config: Config, parallel: DataParallel, data: tuple[Batch, Batch]) -> None:
        super().__init__(config, parallel, data)
        self._train, self._test = data
        self.steps = self.steps_of("the breast cancer data", len(self._train.labels))
        self.test_count = len(self._test.labels)

    @classmethod
    def open(cls, config: Config, description: dict[str, Any] | None = None) -> tuple[Batch, Batch]:
        from sklearn.datasets import load_breast_cancer
        from sklearn.model_selection import train_test_split

        inputs, labels = load_breast_cancer(return_X_y=True)
        inputs = (inputs - inputs.mean(axis=0)) / inputs.std(axis=0)
        split = train_test_split(inputs.astype(np.float32), labels.astype(np.int32), test_size=0.25, random_state=0)
        return Batch(*split[::2]), Batch(*split[1::2])

    @functools.cached_property
    def net(self) -> tuple[nn.Module, Callable[..., jax.Array]]:
        """The network in its precision: the module, and (params, inputs) -> float32 logits."""
        policy, by_modules = mpjax.get_policy(self.config.policy), self.config.amp == "module"
        module = mpjax.with_policy(Net(), policy) if by_modules else Net()
        apply: Callable[..., Any] = module.apply if by_modules else mpjax.autocast(module.apply, policy)
        return module, lambda params, inputs: apply({"params": params}, inputs).astype(jnp.float32)

    def model(self) -> Model:
        module, apply = self.net

        def loss(params: Any, stats: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, tuple[Sums, Any]]:
            logits = apply(params, batch.inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            sums = training.masked_sums(jnp.ones(len(losses)), loss=losses, accuracy=correct(logits, batch.labels))
            return jnp.mean(losses), (sums, stats)

        def update(tx: Any, state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Sums]:
            value_and_grad = mpjax.value_and_grad(loss, state.opt_state, has_aux=True)
            (mean, (sums, _)), grads = value_and_grad(state.params, state.stats, batch, key)
            params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=mean)
            return state._replace(params=params, opt_state=opt_state), sums

        def init(key: jax.Array) -> Variables:
            return Variables(module.init(key, jnp.zeros((1, 30)))["params"], {})

        return Model(init, loss, update, ("loss", "accuracy", "count"))

    @functools.cached_property
    def _test_step(self) -> jax.stages.Wrapped:
        def test_step(params: Any, batch: Batch) -> Sums:
            logits = self.net[1](params, batch.inputs)
            finite = jnp.all(jnp.isfinite(logits), axis=-1)  # an entry with inf or NaN counts as wrong
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
            everything, right = jnp.ones(len(losses)), correct(logits, batch.labels)
            return training.checked_sums(everything, finite, loss=losses, accuracy=right)

        return jax.jit(test_step)

    def example_batches(self) -> Sequence[Batch]:
        return [Batch(np.zeros((self.batch_size, 30), np.float32), np.zeros(self.batch_size, np.int32))]

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        order = np.random.default_rng((self.config.seed, epoch)).permutation(len(self._train.labels))
        for batch in range(first, self.steps):
            chosen = order[batch * self.batch_size :][: self.batch_size]
            yield self.parallel.put(Batch(*(x[chosen] for x in self._train)))

    def test(self, weights: Variables, between_steps: Callable[[], None], *, last: bool = True) -> dict[str, Any]:
        between_steps()
        return training.test_metrics(self._test_step(weights.params, self._test), self.unit, last)


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether the largest logit is that of the label, as 0 or 1."""
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)


main = functools.partial(modes.main, CustomTask)

if __name__ == "__main__":
    raise SystemExit(main())
