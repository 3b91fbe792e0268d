"""`python -m examples.speech`: trains speech recognisers. From top to bottom: data, model and loss, tests.

What all scripts share is in `examples/common/`: the step (training.py), optimizers and loss scale (optimizers.py), and
the loop over epochs (loop.py). models.py sets the policy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.common import modes
from examples.common.training import Loss, Model, TrainState, Variables, masked_sums
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

    # Model and loss.

    def model(self, data: dict[str, Any]) -> Model:
        config = self.config
        network = create_network(config, self.alphabet.labels)

        def loss(variables: Variables, batch: Batch, key: jax.Array, not_finite: jax.Array) -> Loss:
            masks, dropout = jax.random.split(key)
            features, lengths, readable = finite_features(config, batch.audio, batch.audio_lengths)
            if config.augment:
                features = spec_augment(masks, features, lengths)
            counted = readable & (batch.weights > 0)
            applied = network.apply(*variables, features, lengths, dropout)
            losses = ctc_losses(applied, batch)
            mean = jnp.sum(jnp.where(counted, losses, 0)) / jnp.maximum(jnp.sum(counted), 1)
            losses = jnp.where(readable, losses, jnp.nan)
            # Padding has index -1, which would index the last utterance.
            where = jnp.where((batch.weights > 0) & ~jnp.isfinite(losses), batch.indices, len(not_finite))
            not_finite = not_finite.at[where].add(1, mode="drop")
            return Loss(mean, masked_sums(counted, loss=losses), applied.stats, not_finite)

        return Model(network.init, loss, lambda: jnp.zeros(data["utterances"], jnp.int32))

    def epoch_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        line = super().epoch_metrics(state, between_steps)
        self.not_finite = np.asarray(state.extra)
        return line | {"not_finite": int(np.count_nonzero(self.not_finite))}

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
        beam = self.config.final_beam if last and self._dev is None else 0
        self.transcribed = self._epoch_tester.run(weights, beam, between_steps)
        return {f"{self.prefix}{name}": value for name, value in metrics_of_test(self.transcribed, last).items()}

    def final_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        if self._dev is None or self._test is None or self.best is None:
            return {}
        self.transcribed = self._test.run(self.training.weights(state), self.config.final_beam, between_steps)
        return metrics_of_test(self.transcribed)

    def predict(self, variables: Variables) -> dict[str, Any]:
        return transcribe_files(self, variables)

    def inference_step(self) -> jax.stages.Wrapped:
        return create_transcribe_step(self.config, self.alphabet.labels, self.config.final_beam)


main = functools.partial(modes.main, SpeechTask)
