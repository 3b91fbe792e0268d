"""Images from a tree of folders, one per class, decoded as they are needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import UsageError
from examples.imagenet.augmentation import MIDDLE, Crop, middle_box, random_box
from examples.imagenet.cache import CachedImages, cached
from examples.imagenet.data import Augmentation, Batch, Dataset, Loaded, Unreadable
from examples.imagenet.decoding import UnreadableImageError, read_crop
from examples.imagenet.image_tree import Images, list_tree
from examples.imagenet.unreadable import UnreadableImages


class ImageFolder(Dataset):
    """One split of a tree `SPLIT/CLASS/*.jpg|jpeg|png`.

    Training: a random crop and perhaps its mirror image; else the middle of the image. Every crop is resized to
    `size`. In training the image after it takes the place of one that can not be read: a blank one would count in the
    batch's normalisation statistics, and a shorter batch would compile another program. Otherwise its mask is 0.
    """

    # Of ImageNet, in RGB: https://docs.pytorch.org/vision/stable/models.html.
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(self, images: Images, classes: Sequence[str], size: int, flip: bool, max_unreadable: float) -> None:
        self.name, self.classes, self.image_shape = images.root, tuple(classes), (size, size, 3)
        self.images, self.problems = images, UnreadableImages(len(images.paths), max_unreadable)
        self._size, self._flip = size, flip
        self._cache: CachedImages | None = None

    def use(self, cache: CachedImages) -> None:
        """From now on images come from memory."""
        self._cache, self.in_memory = cache, True

    def __len__(self) -> int:
        return len(self.images.paths)

    @property
    def unreadable(self) -> int:
        return len(self.problems.paths)

    def report(self, unreadable: Sequence[Unreadable]) -> None:
        self.problems.add(unreadable)

    @functools.cached_property
    def _digest(self) -> str:
        return self.images.digest()

    def state(self) -> dict[str, Any]:
        unreadable = sorted(os.path.relpath(path, self.name) for path in self.problems.paths)
        return super().state() | {"digest": self._digest, "unreadable": unreadable}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if state["digest"] != self._digest:
            raise UsageError(
                f"{self.name}: as many images as when the run began, but not the same files; a run can only be resumed "
                f"with the same images. Put them back, or start a new run."
            )
        self.problems.paths.update(os.path.join(self.name, path) for path in state["unreadable"])

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Loaded:
        batch = Batch(
            np.zeros((len(indices), *self.image_shape), np.uint8),
            np.zeros(len(indices), np.int32),
            np.ones(len(indices), np.float32),
        )
        unreadable: list[Unreadable] = []
        for row, index in enumerate(indices):
            batch.mask[row] = self._fill(batch, row, int(index), augmentation, unreadable)
        return Loaded(batch, tuple(unreadable))

    def _fill(
        self, batch: Batch, row: int, index: int, augmentation: Augmentation | None, unreadable: list[Unreadable]
    ) -> bool:
        # One more than may be unreadable: then the report of them ends the run.
        for candidate in range(index, index + (1 if augmentation is None else self.problems.limit + 1)):
            candidate %= len(self)
            try:
                batch.images[row] = self._read(candidate, augmentation)
                batch.labels[row] = self.images.labels[candidate]
                return True
            except UnreadableImageError as error:
                unreadable.append(Unreadable(self.images.path(candidate), str(error)))
        return False

    def _read(self, index: int, augmentation: Augmentation | None) -> np.ndarray:
        def choose(full: tuple[int, int]) -> Crop:
            shape = (self._size, self._size)
            if augmentation is None:
                return Crop(middle_box(full), shape)
            # An image's dice are its own: they do not depend on the batch that it is in.
            rng = np.random.default_rng([*augmentation, index])
            return Crop(random_box(full, rng), shape, self._flip and rng.random() < 0.5)

        return self._cache.read(index, choose) if self._cache else read_crop(self.images.path(index), choose)


def open_image_folder(
    root: Path, size: int, flip: bool, workers: int, max_unreadable: float, cache: bool = False
) -> tuple[ImageFolder, ImageFolder]:
    """The training and the test images below `root`.

    Args:
        root: of the tree.
        size: side in pixels that crops are resized to.
        flip: whether training images are mirrored at random.
        workers: threads that fill the cache.
        max_unreadable: share of the images of a split that may be unreadable.
        cache: whether to decode all images now, and keep them in memory with their shorter side at `size` * 8/7, of
            which the middle of `size` is tested on: 256 for 224.

    Raises:
        UsageError: the tree is not as it should be, too many images can not be read, or they do not fit memory.
    """
    classes, *splits = list_tree(root)
    train, test = (ImageFolder(images, classes, size, flip, max_unreadable) for images in splits)
    if cache:
        caches = cached([train.images, test.images], round(size / MIDDLE), workers)
        for folder, memory in zip((train, test), caches, strict=True):
            folder.report(memory.unreadable)
            folder.use(memory)
    return train, test
