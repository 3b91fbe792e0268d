"""`python -m examples.speech`: trains speech recognisers. From top to bottom: data, model, loss, step, tests.

What all scripts share is in `examples/common/`: optimizers and loss scale (optimizers.py), and the loop over epochs
(loop.py). models.py sets the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from examples.common import modes
from examples.common.training import Aux, Model, TrainState, Updated, Variables, masked_sums
from examples.speech.batching import Batch
from examples.speech.features import spec_augment
from examples.speech.models import create_network, create_transcribe_step, ctc_losses, finite_features
from examples.speech.task import SpeechData
from examples.speech.testing import Tester, metrics_of_test, transcribe_files


class SpeechTask(SpeechData):
    """A speech recogniser and its data, on all devices."""

    # Data.

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        assert self._buckets is not None
        return self._buckets.train_batches(self.config.seed, epoch, first)

    # Model, loss and step.

    def model(self) -> Model:
        config = self.config
        network = create_network(config, self.alphabet.labels)

        def loss(params: Any, stats: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, Aux]:
            masks, dropout = jax.random.split(key)
            features, lengths, readable = finite_features(batch.audio, batch.audio_lengths)
            if config.augment:
                features = spec_augment(masks, features, lengths)
            counted = readable & (batch.weights > 0)
            losses = ctc_losses(*network.apply(params, features, lengths, dropout), batch)
            mean = jnp.sum(jnp.where(counted, losses, 0)) / jnp.maximum(jnp.sum(counted), 1)
            sums = masked_sums(counted, loss=losses)
            return mean, Aux({**sums, "not_finite": jnp.sum(batch.weights) - sums["count"]}, stats)

        def update(tx: Any, state: TrainState, batch: Batch, key: jax.Array) -> Updated:
            value_and_grad = mpjax.value_and_grad(loss, state.opt_state, has_aux=True)
            (mean, aux), grads = value_and_grad(state.params, state.stats, batch, key)
            params, opt_state = mpjax.apply_gradients(tx, grads, state.opt_state, state.params, value=mean)
            return Updated(params, state.stats, opt_state, aux.sums)

        return Model(network.init, loss, update, ("loss", "not_finite", "count"))

    # Tests and predictions.

    @property
    def _epoch_tester(self) -> Tester:
        tester = self._dev or self._test
        assert tester is not None
        return tester

    def compile(self) -> None:
        super().compile()
        if self.best is not None:
            weights = jax.eval_shape(self.training.weights, self.abstract_state())
            self._epoch_tester.compile(self.parallel.like_state(weights))

    def test(
        self, weights: Variables, between_steps: Callable[[], None] = lambda: None, *, last: bool = True
    ) -> dict[str, Any]:
        self.transcribed = self._epoch_tester.run(weights, between_steps)
        return {f"{self.prefix}{name}": value for name, value in metrics_of_test(self.transcribed, last).items()}

    def final_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        if self._dev is None or self._test is None or self.best is None:
            return {}
        self.transcribed = self._test.run(self.training.weights(state), between_steps)
        return metrics_of_test(self.transcribed)

    def predict(self, variables: Variables) -> dict[str, Any]:
        return transcribe_files(self, variables)

    def inference_step(self) -> jax.stages.Wrapped:
        return create_transcribe_step(self.config, self.alphabet.labels)


main = functools.partial(modes.main, SpeechTask)
