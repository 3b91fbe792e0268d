"""Batches of utterances of similar length, in an order that depends only on seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from examples.common.loading import ALONE, Loading, loaded
from examples.speech.dataset import Speech
from examples.speech.features import NO_PERTURBATION, Draw, Perturbation, frames_of, samples_of

Array = np.ndarray | jax.Array

# Batch lengths in frames are multiples of this, so that some are still multiples of 8 after the model's strides.
_FRAMES = 16


class Batch(NamedTuple):
    """Utterances of one bucket; entries with weight 0 are padding and are ignored.

    Padding entries have audio and label length 0. Values past an utterance's length are zeros.
    """

    audio: Array  # [batch, samples], float32 in -1..1, 16 kHz
    audio_lengths: Array  # [batch], int32, in samples
    labels: Array  # [batch, characters], int32; 0 is CTC's blank, and padding
    label_lengths: Array  # [batch], int32
    weights: Array  # [batch], float32: 1 for an utterance, 0 for padding
    indices: Array  # [batch], int32: indices of the utterances in their dataset; -1 for padding


class Shape(NamedTuple):
    """The shape of the batches of a bucket; a step is compiled for each shape."""

    batch: int
    samples: int
    characters: int

    def zeros(self) -> Batch:
        """A batch of this shape that contains only padding."""
        size = self.batch
        audio, labels = np.zeros((size, self.samples), np.float32), np.zeros((size, self.characters), np.int32)
        lengths, weights = np.zeros((2, size), np.int32), np.zeros(size, np.float32)
        return Batch(audio, lengths[0], labels, lengths[1], weights, np.full(size, -1, np.int32))


_Plan = tuple[Shape, np.ndarray]  # a batch that has not been loaded yet: the indices of its utterances


class Buckets:
    """Pads the batches of a dataset to a few lengths, each of which is compiled once.

    Utterances left over in a bucket move to the next longer one, so every training batch is full.

    Args:
        speech: The utterances; later changes to it are ignored.
        batch_size: Number of utterances in a batch.
        count: Maximum number of buckets, whose lengths are multiples of 16 frames.
        perturbation: Perturbation of the training utterances.
        loading: How batches are loaded; by default by one thread, for the first device.

    Attributes:
        shapes: All shapes of full batches, from short to long.
        steps: Number of batches in each training epoch.
    """

    def __init__(
        self,
        speech: Speech,
        batch_size: int,
        count: int = 4,
        perturbation: Perturbation = NO_PERTURBATION,
        loading: Loading = ALONE,
    ) -> None:
        self._speech, self._perturbation, self._loading = speech, perturbation, loading
        self._own = loading.own(batch_size)
        self._batch_size, self.steps = batch_size, len(speech) // batch_size
        characters = max(len(labels) for labels in speech.labels)
        self.shapes = tuple(Shape(batch_size, samples, characters) for samples in self._edges(count))

    def train_batches(self, seed: int, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from number `first` on: shuffled, perturbed and full.

        An unusable file leaves an entry of weight 0.
        """
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(self._speech))[: self.steps * self._batch_size]
        draw = self._perturbation.draw(rng, len(self._speech))
        plans = self._plans(order, self._perturbation, draw)
        return self._load_all([plans[i] for i in rng.permutation(len(plans))[first:]], self._perturbation, draw)

    def evaluation_batches(self) -> Iterator[Batch]:
        """All utterances once, unperturbed, from short to long; the last batch is padded."""
        order = np.argsort(self._speech.samples, kind="stable")
        unchanged = NO_PERTURBATION.draw(np.random.default_rng(0), len(order))
        return self._load_all(self._plans(order, NO_PERTURBATION, unchanged), NO_PERTURBATION, unchanged)

    def _edges(self, count: int) -> list[int]:
        samples = self._speech.samples
        slowest = min(self._perturbation.speeds)
        longest = self._perturbation.lengths(samples.max(), self._perturbation.speeds.index(slowest))
        quantiles = np.quantile(samples, np.arange(1, count) / count)
        frames = frames_of(np.array([*quantiles.astype(np.int64), int(longest)]))
        # One extra frame has space for any remainder of a hop.
        rounded = -(-(frames + 1) // _FRAMES) * _FRAMES
        return [samples_of(int(size)) for size in np.unique(rounded)]

    def _plans(self, order: np.ndarray, perturbation: Perturbation, draw: Draw) -> list[_Plan]:
        lengths = perturbation.lengths(self._speech.samples[order], draw[0][order])
        bucket_of = np.searchsorted([shape.samples for shape in self.shapes], lengths)
        plans: list[_Plan] = []
        rest = order[:0]
        for number, shape in enumerate(self.shapes):
            members = np.concatenate([rest, order[bucket_of == number]])
            full = len(members) // self._batch_size * self._batch_size
            plans += [(shape, part) for part in members[:full].reshape(-1, self._batch_size)]
            rest = members[full:]
        return [*plans, (self.shapes[-1], rest)] if len(rest) else plans

    def _load_all(self, plans: Sequence[_Plan], perturbation: Perturbation, draw: Draw) -> Iterator[Batch]:
        return loaded(plans, lambda plan: self._load(plan, perturbation, draw), self._loading)

    def _load(self, plan: _Plan, perturbation: Perturbation, draw: Draw) -> Batch:
        (shape, indices), (speeds, gains) = plan, draw
        batch = shape._replace(batch=len(range(shape.batch)[self._own])).zeros()
        for row, index in enumerate(indices[self._own]):
            if (audio := self._speech.load(int(index))) is None:
                continue
            audio, labels = perturbation.apply(audio, int(speeds[index]), gains[index]), self._speech.labels[index]
            batch.audio[row, : len(audio)] = audio
            batch.labels[row, : len(labels)] = labels
            batch.audio_lengths[row], batch.label_lengths[row] = len(audio), len(labels)
            batch.weights[row], batch.indices[row] = 1, index
        return batch
