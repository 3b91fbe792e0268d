"""Transcribes a set of utterances with a model, and its error rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from examples.common.benchmarking import compile_step
from examples.common.devices import DataParallel
from examples.common.hosts import gather_to_host
from examples.common.task import shape_of
from examples.common.training import Variables, check_outputs
from examples.speech.batching import Array, Buckets
from examples.speech.config import Config
from examples.speech.dataset import Speech
from examples.speech.models import create_test_step
from examples.speech.reports import Transcribed, error_rates


class Tester:
    """Transcribes a set of utterances with a model."""

    def __init__(self, config: Config, speech: Speech, parallel: DataParallel) -> None:
        self._config, self._speech, self._parallel = config, speech, parallel
        # A small set is not padded to a full batch.
        batch_size = -(-min(config.preset.batch_size, len(speech)) // parallel.count) * parallel.count
        self._buckets = Buckets(speech, batch_size, config.front_end, config.buckets, workers=config.workers)
        self._steps: dict[int, dict[Any, Any]] = {}

    def compile(self, variables: Any, beam: int = 0) -> None:
        """Compiles the steps of a decoder for variables or their `ShapeDtypeStruct`s."""
        step = create_test_step(self._config, self._speech.alphabet.labels, beam)
        batches = [self._parallel.like_batch(shape.zeros()) for shape in self._buckets.shapes]
        self._steps[beam] = {shape_of(batch): compile_step(step, variables, batch).call for batch in batches}

    def run(
        self, variables: Variables, beam: int = 0, between_steps: Callable[[], None] = lambda: None
    ) -> list[Transcribed]:
        """Transcribes each utterance by beam search with `beam` prefixes, or greedily if 0."""
        if beam not in self._steps:
            self.compile(variables, beam)
        found: list[Transcribed] = []
        for batch in self._buckets.evaluation_batches():
            between_steps()
            batch = self._parallel.put(batch)
            step = self._steps[beam][shape_of(batch)]
            found += self._transcribed(*gather_to_host((batch.weights, batch.indices, *step(variables, batch))))
        return found

    def _transcribed(
        self, weights: Array, indices: Array, losses: Any, finite: Any, decoded: Any
    ) -> Iterator[Transcribed]:
        speech = self._speech
        for row in np.flatnonzero(weights):
            index = indices[row]
            # Without finite logits there is no transcript: every word counts as wrong.
            text = speech.alphabet.decode(decoded.labels[row, : decoded.lengths[row]]) if finite[row] else ""
            yield Transcribed(
                str(speech.paths[index]), speech.transcripts[index], text, float(losses[row]), bool(finite[row])
            )


def metrics_of_test(transcribed: Iterable[Transcribed], last: bool = True) -> dict[str, Any]:
    """The mean of the finite losses, the error rates, and the number of utterances with non-finite logits."""
    items = list(transcribed)
    nonfinite = sum(not item.finite for item in items)
    check_outputs(nonfinite, len(items), "utterances", last)
    losses = [item.loss for item in items if np.isfinite(item.loss)]
    rates = error_rates([item.reference for item in items], [item.hypothesis for item in items])
    return {
        "test_loss": float(np.mean(losses)) if losses else float("nan"),
        **rates._asdict(),
        "test_nonfinite": nonfinite,
    }
