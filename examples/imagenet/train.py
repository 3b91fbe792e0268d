"""`python -m examples.imagenet`: trains image classifiers. From top to bottom: data, model, loss, step, tests.

`examples/common/` has what scripts share: the optimizer and its loss scale (optimizers.py), the loop (loop.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from examples.common import modes, training
from examples.common.training import Aux, Model, Sums, TrainState, Updated, Variables
from examples.imagenet.data import Batch, empty_batch, evaluation_batches, train_batches
from examples.imagenet.decoding import erase, mix_up
from examples.imagenet.models import check_outputs_of, network
from examples.imagenet.task import TOP, ImageData, correct


class ImageTask(ImageData):
    """An image classifier and its data, on all devices."""

    # Data.

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        if self._stream is None:
            # One stream over all epochs, so that the next epoch's first batches load during evaluation.
            how: dict[str, Any] = {"augment": self.config.augment, "loading": self.loading}
            how |= {"last": self.epochs * self.steps} if self.config.action == "train" else {}
            first_step = epoch * self.steps + first
            self._stream = train_batches(self.train_set, self.batch_size, self.config.seed, first=first_step, **how)
        return itertools.islice(self._stream, self.steps - first)

    # Model, loss and step.

    @functools.cached_property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The model in the precision of the flags: its initialisation, its training form and its evaluation form."""
        config, about = self.config, self.about
        policy, by_modules = mpjax.get_policy(config.policy), config.amp == "module"
        net = network(config.model_name, len(about.classes), about.image_shape[-1], policy if by_modules else None)
        check_outputs_of(config.model_name, net, len(about.classes), about.image_shape)

        # Separate functions for training and evaluation, so that autocast sees the mode as a constant.
        def train(variables: Variables, images: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
            return net.apply(variables, images, key)

        def use(variables: Variables, images: jax.Array) -> tuple[jax.Array, Any]:
            return net.apply(variables, images, None)

        if not by_modules:
            train, use = mpjax.autocast(train, policy), mpjax.autocast(use, policy)
        return lambda key: net.init(key, jnp.zeros((1, *about.image_shape))), train, use

    def prepare(self, images: Any) -> jax.Array:
        """Normalises images on the device: transferring bytes takes a quarter of the bandwidth of float32."""
        mean, std = np.asarray(self.about.mean, np.float32), np.asarray(self.about.std, np.float32)
        return (jnp.asarray(images, jnp.float32) / 255 - mean) / std

    def model(self) -> Model:
        init, train, _ = self.functions

        def loss(params: Any, stats: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, Aux]:
            blend = mix_up(key, self.config.mixup, len(batch.labels))
            images = erase(jax.random.fold_in(key, 2), self.prepare(batch.images), self.config.random_erasing)
            logits, stats = train(Variables(params, stats), blend(images), jax.random.fold_in(key, 1))
            targets = optax.smooth_labels(_one_hot(batch, logits), self.config.label_smoothing)
            # Float32 even if the policy's output is half precision: the log-sum-exp needs the mantissa.
            losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), blend(targets))
            sums = training.masked_sums(jnp.asarray(batch.mask), loss=losses, **correct(logits, batch.labels))
            return jnp.mean(losses), Aux(sums, stats)

        def update(tx: Any, state: TrainState, batch: Batch, key: jax.Array) -> Updated:
            value_and_grad = mpjax.value_and_grad(loss, state.opt_state, has_aux=True)
            (mean, aux), grads = value_and_grad(state.params, state.stats, batch, key)
            params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=mean)
            # A skipped step leaves the statistics as they were, too.
            stats = mpjax.keep_if_finite(opt_state, aux.stats, state.stats)
            return Updated(params, stats, opt_state, aux.sums)

        return Model(init, loss, update, self.sums)

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the sums over a batch."""
        return ("loss", "accuracy", *(("top5_accuracy",) if len(self.about.classes) > TOP else ()), "count")

    # Tests and predictions.

    @functools.cached_property
    def predict_step(self) -> jax.stages.Wrapped:
        """Jitted (variables, images) -> probabilities; NaN without finite logits."""
        use = self.functions[2]

        def predict_step(variables: Variables, images: Any) -> jax.Array:
            logits, _ = use(variables, self.prepare(images))
            finite = jnp.all(jnp.isfinite(logits), axis=-1, keepdims=True)
            return jnp.where(finite, jax.nn.softmax(logits.astype(jnp.float32)), jnp.nan)

        return jax.jit(predict_step)

    @functools.cached_property
    def _compiled_test(self) -> Callable[..., Sums]:
        use = self.functions[2]

        def test_step(variables: Variables, sums: Sums, batch: Batch) -> Sums:
            logits, _ = use(variables, self.prepare(batch.images))
            finite = jnp.all(jnp.isfinite(logits), axis=-1)
            losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), _one_hot(batch, logits))
            found = training.checked_sums(jnp.asarray(batch.mask), finite, loss=losses, **correct(logits, batch.labels))
            return jax.tree.map(jnp.add, sums, found)

        state = jax.eval_shape(self.training.weights, self.abstract_state())
        batch = self.parallel.like_batch(empty_batch(self.test_batch_size, self.about.image_shape))
        step = jax.jit(test_step, donate_argnums=1)
        return training.compile_step(step, self.parallel.like_state(state), self._zero(), batch).call

    def _zero(self) -> Sums:
        return self.parallel.replicate(training.zeros((*self.sums, "nonfinite")))

    def compile(self) -> None:
        super().compile()
        if self.best is not None:
            _ = self._compiled_test

    def test(
        self, weights: Variables, between_steps: Callable[[], None] = lambda: None, *, last: bool = True
    ) -> dict[str, Any]:
        step, sums = self._compiled_test, self._zero()
        for batch in evaluation_batches(self.test_set, self.test_batch_size, self.loading):
            between_steps()
            sums = step(weights, sums, batch)
        return {f"test_{name}": value for name, value in training.tested_means(sums, self.unit, last).items()}


def _one_hot(batch: Batch, logits: jax.Array) -> jax.Array:
    return jax.nn.one_hot(batch.labels, logits.shape[-1])


main = functools.partial(modes.main, ImageTask)
