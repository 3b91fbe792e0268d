"""Labelled images: datasets and batches.

Usage in a training loop (see pipeline.py for the two functions):

    train_set, test_set = open_image_folder(...)            # or the datasets of embedded.py
    steps = len(train_set) // batch_size
    with train_batches(train_set, batch_size, seed, first=step, last=epochs * steps, ...) as batches:
        for batch in itertools.islice(batches, steps):      # one epoch; the stream continues over epochs
            state = train_step(state, batch)
    with evaluation_batches(test_set, batch_size, ...) as batches:
        for batch in batches: ...                           # every image once; padded with mask 0

The order depends only on `seed` and the step number since the start of training. A checkpoint therefore needs only the
number of completed steps to continue at the next batch, with any number of workers. `Dataset.state()` also stores the
unreadable images, and `Dataset.restore()` detects files that were added or removed in between.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.common.cli import UsageError

Array = np.ndarray | jax.Array


class Batch(NamedTuple):
    """Images with labels; entries with `mask` 0 are padding and are ignored."""

    images: Array  # [batch, height, width, channels], uint8
    labels: Array  # [batch], int32
    mask: Array  # [batch], float32


class Description(NamedTuple):
    """The properties of images that a model depends on."""

    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Description:
        """Restores a description from its JSON form of `_asdict`; raises `UsageError` if the values are invalid."""
        try:
            read = cls(**{name: tuple(value) for name, value in values.items()})
            numbers = (*read.mean, *read.std)
            sane = len(read.image_shape) == 3 and len(read.mean) == len(read.std) == read.image_shape[2] in (1, 3)
            sane = sane and all(8 <= side <= 4096 for side in read.image_shape[:2]) and len(read.classes) < 10**6
            if not (sane and all(isinstance(x, float) for x in numbers)):
                raise ValueError(f"image shape {read.image_shape}, mean {read.mean}, deviation {read.std}")
        except (TypeError, ValueError) as error:
            raise UsageError(f"the model's description of its images is damaged: {error}.") from error
        return read


def empty_batch(batch_size: int, image_shape: tuple[int, int, int]) -> Batch:
    """A batch of zeros."""
    return Batch(
        np.zeros((batch_size, *image_shape), np.uint8),
        np.zeros(batch_size, np.int32),
        np.zeros(batch_size, np.float32),
    )


class Augmentation(NamedTuple):
    """The random seed of one epoch; each image draws its own numbers from it."""

    seed: int
    epoch: int


class Dataset(abc.ABC):
    """Labelled images; `load` runs in other threads."""

    name: str
    classes: Sequence[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]

    @property
    def description(self) -> Description:
        """The properties of these images that a model depends on."""
        return Description(tuple(self.classes), self.image_shape, self.mean, self.std)

    def name_of(self, index: int) -> tuple[str, str]:
        """The location of an image, and its class."""
        raise NotImplementedError  # synthetic images have no names, and are only loaded for benchmarks

    @property
    def unreadable(self) -> int:
        """Number of unreadable images skipped so far."""
        return 0

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        """Loads the images at `indices`, randomly augmented if `augmentation` is given.

        Raises:
            UsageError: Too many files are unreadable.
        """

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint stores in addition to the number of steps, as JSON."""
        return {"images": len(self)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a `state`.

        Raises:
            UsageError: The state belongs to different images.
        """
        if state["images"] != len(self):
            raise UsageError(
                f"{self.name}: {len(self)} images, but {state['images']} when the run began; a run can only be "
                f"resumed with the same images. Put them back, or start a new run."
            )


def check_batch_size(dataset: Dataset, batch_size: int) -> None:
    """Raises `UsageError` if an epoch is smaller than one batch."""
    if batch_size > len(dataset):
        raise UsageError(
            f"--batch-size {batch_size} is larger than the data: {dataset.name} has {len(dataset)} training "
            f"images. Give at most {len(dataset)}."
        )
