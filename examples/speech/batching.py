"""Batches of utterances of like length, in an order that follows from seed and epoch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

Array = np.ndarray | jax.Array


class Batch(NamedTuple):
    """Utterances of one bucket; entries whose `weights` is 0 fill the batch up and count for nothing.

    Filling entries have length 0 in audio and in labels. Behind an utterance's length are zeros.
    """

    audio: Array  # [batch, samples], float32 in -1..1, 16 kHz
    audio_lengths: Array  # [batch], int32, in samples
    labels: Array  # [batch, characters], int32; 0 is CTC's blank and fills up
    label_lengths: Array  # [batch], int32
    weights: Array  # [batch], float32: 1 for an utterance, 0 for filling
    indices: Array  # [batch], int32: of the utterances in their dataset (the filling's are -1)


class Shape(NamedTuple):
    """The shape that the batches of a bucket have: what a step is compiled for."""

    batch: int
    samples: int
    characters: int


class Speech:
    """Utterances with their transcripts: `load` may be called from any thread.

    Attributes:
        name: for titles and messages.
        paths: of the audio files.
        transcripts: what is spoken in them.
        alphabet: encodes `transcripts`, decodes what the model says.
        samples: [utterances], int64: lengths at 16 kHz.
    """

    def keep_decodable(self, frames: Callable[[np.ndarray], np.ndarray]) -> None:
        """Drops utterances whose transcripts CTC can not align to their frames; counted and named in `skipped`.

        Args:
            frames: from lengths in samples to the number of frames that the model puts out.
        """
        raise NotImplementedError


class Buckets:
    """The few lengths that batches of a dataset are padded to.

    Buckets(speech, batch_size, count=4).shapes are all shapes of batches there will be: compile a step for each.
    """

    shapes: tuple[Shape, ...]
    steps: int  # of a training epoch: len(speech) // batch_size, the same in every epoch

    def train_batches(self, seed: int, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from number `first` on, shuffled, perturbed as the dataset says."""
        raise NotImplementedError

    def evaluation_batches(self) -> Iterator[Batch]:
        """All utterances once, the last batch of each bucket filled up."""
        raise NotImplementedError
