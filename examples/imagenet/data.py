"""Batches of images in an order that follows from seed and epoch alone, so that a run can stop anywhere."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np

from examples.common.cli import UsageError

Array = np.ndarray | jax.Array

# Batches that are prepared while the device works on earlier ones.
_AHEAD = 2


class Batch(NamedTuple):
    """Images with labels; entries whose `mask` is 0 fill the batch up and count for nothing."""

    images: Array  # [batch, height, width, channels], uint8
    labels: Array  # [batch], int32
    mask: Array  # [batch], float32


class Augmentation(NamedTuple):
    """What makes the random numbers of one epoch, for each image by itself."""

    seed: int
    epoch: int


class Dataset(abc.ABC):
    """Labelled images; `load` is called from another thread."""

    name: str
    classes: Sequence[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]

    @property
    def unreadable(self) -> int:
        """Images met so far that could not be read, and were skipped."""
        return 0

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        """The images at `indices`, changed at random where there is an `augmentation`."""


class Digits(Dataset):
    """The handwritten digits inside scikit-learn: 1,437 to train on, 360 to test on, grey, 8x8.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI (1998).
    """

    name = "digits"
    classes = tuple("0123456789")
    mean = (0.305,)
    std = (0.376,)
    image_shape = (8, 8, 1)

    def __init__(self, split: str) -> None:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        # Grey values 0..16; the split is a constant of the task, whatever the run's seed.
        images = np.round(pixels * (255 / 16)).astype(np.uint8).reshape(-1, *self.image_shape)
        train, test = train_test_split(np.arange(len(labels)), test_size=360, stratify=labels, random_state=0)
        chosen = train if split == "train" else test
        self._images, self._labels = images[chosen], labels[chosen].astype(np.int32)

    def __len__(self) -> int:
        return len(self._labels)

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        images = self._images[indices]
        if augmentation is not None:
            # One draw for all images, so that an image's shift does not depend on its batch.
            shifts = np.random.default_rng(augmentation).integers(0, 3, size=(len(self), 2))[indices]
            images = _shift(images, shifts)
        return Batch(images, self._labels[indices], np.ones(len(indices), np.float32))


def _shift(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Moves each image by -1, 0 or 1 pixel (0, 1 or 2 in `shifts`) down and to the right."""
    _, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = shifts[:, 0, None] + np.arange(height)
    columns = shifts[:, 1, None] + np.arange(width)
    return padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]


def check_batch_size(dataset: Dataset, batch_size: int) -> None:
    """An epoch must hold one full batch: the last, smaller one of an epoch is dropped."""
    if batch_size > len(dataset):
        raise UsageError(
            f"--batch-size {batch_size} is larger than the data: {dataset.name} has {len(dataset)} training "
            f"images. Give at most {len(dataset)}."
        )


def train_batches(
    dataset: Dataset, batch_size: int, augmentation: Augmentation, augment: bool, first: int = 0
) -> Iterator[Batch]:
    """The batches of one epoch from number `first` on; the last partial one is dropped."""
    order = np.random.default_rng(augmentation).permutation(len(dataset))
    steps = len(dataset) // batch_size
    plan = order[: steps * batch_size].reshape(steps, batch_size)[first:]
    return _prefetched(dataset, plan, augmentation if augment else None)


def evaluation_batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """All images once, in order; the last batch is filled up with masked entries."""
    batch_size = min(batch_size, len(dataset))
    starts = range(0, len(dataset), batch_size)
    plan = (np.arange(start, min(start + batch_size, len(dataset))) for start in starts)
    for batch in _prefetched(dataset, plan, None):
        missing = batch_size - len(batch.labels)
        yield Batch(*(np.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in batch))


def _prefetched(dataset: Dataset, plan: Iterable[np.ndarray], augmentation: Augmentation | None) -> Iterator[Batch]:
    with ThreadPoolExecutor(1, "batches") as executor:
        waiting: deque[Future[Batch]] = deque()
        try:
            for indices in plan:
                waiting.append(executor.submit(dataset.load, indices, augmentation))
                if len(waiting) > _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            # A loop that stops early must not wait for batches that nobody will see.
            executor.shutdown(wait=False, cancel_futures=True)
