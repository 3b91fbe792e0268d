"""Labelled images: datasets and batches.

How a training loop uses it (see pipeline.py for the two functions):

    train_set, test_set = open_image_folder(...)            # or those of embedded.py
    steps = steps_per_epoch(train_set, batch_size)
    with train_batches(train_set, batch_size, seed, first=step, last=epochs * steps, ...) as batches:
        for batch in itertools.islice(batches, steps):      # one epoch; the stream itself goes on over epochs
            state = train_step(state, batch)
    with evaluation_batches(test_set, batch_size, ...) as batches:
        for batch in batches: ...                           # every image once; filled up with mask 0

The order follows from `seed` and the number of a step since the start of training alone. So the number of steps done
is all that a checkpoint must hold to go on at the next batch, with any number of workers; `Dataset.state()` beside it
keeps the count of unreadable images and finds out that files were added or removed in between.
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
    """Images with labels; entries whose `mask` is 0 fill the batch up and count for nothing."""

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
        """From `_asdict` after a way through JSON; a `UsageError` where that is something else."""
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
    """The seed of the random numbers of one epoch; each image draws its own."""

    seed: int
    epoch: int


class Unreadable(NamedTuple):
    """A file that is no image, or not a whole one."""

    name: str  # below the root of its dataset
    reason: str


class Loaded(NamedTuple):
    """A batch, and the files that could not be read for it."""

    batch: Batch
    unreadable: tuple[Unreadable, ...] = ()


class Dataset(abc.ABC):
    """Labelled images; `load` is called in other threads, or in other processes where not `in_memory`."""

    name: str
    classes: Sequence[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]
    in_memory = False  # such data is not copied into worker processes: threads read it

    @property
    def description(self) -> Description:
        """What a model must know of these images."""
        return Description(tuple(self.classes), self.image_shape, self.mean, self.std)

    def name_of(self, index: int) -> tuple[str, str]:
        """Where an image is, and its class."""
        raise NotImplementedError

    @property
    def unreadable(self) -> int:
        """Images met so far that could not be read, and were skipped."""
        return 0

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Loaded:
        """The images at `indices`, changed at random where there is an `augmentation`."""

    def report(self, unreadable: Sequence[Unreadable]) -> None:  # noqa: B027 - data in memory have nothing to report
        """Takes note, in the loop's own thread, of files that could not be read.

        Raises:
            UsageError: they are too many.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint should hold beside the number of steps, as JSON."""
        return {"images": len(self)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up a `state` again.

        Raises:
            UsageError: the images are not the ones that the state is about.
        """
        if state["images"] != len(self):
            raise UsageError(
                f"{self.name}: {len(self)} images, and {state['images']} when the run began; a run can only be "
                f"resumed with the same images. Put them back, or start a new run."
            )


def steps_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Full batches in an epoch: the last, smaller one is dropped."""
    return len(dataset) // batch_size


def check_batch_size(dataset: Dataset, batch_size: int) -> None:
    """An epoch must hold one full batch."""
    if batch_size > len(dataset):
        raise UsageError(
            f"--batch-size {batch_size} is larger than the data: {dataset.name} has {len(dataset)} training "
            f"images. Give at most {len(dataset)}."
        )
