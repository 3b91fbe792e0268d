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
    """One split of a tree `SPLIT/CLASS/*.jpg|png|...`.

    Training: a random crop and perhaps its mirror image; else the middle of the image. Every crop, or the `whole`
    image, is resized to `size`. In training the image after it takes the place of one that can not be read: a blank
    one would count in the batch's normalisation statistics, and a shorter batch would compile another program.
    Otherwise its mask is 0.
    """

    # Of ImageNet, in RGB: https://docs.pytorch.org/vision/stable/models.html.
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(
        self,
        images: Images,
        classes: Sequence[str],
        size: int,
        flip: bool,
        max_unreadable: float,
        whole: bool = False,
    ) -> None:
        self.name, self.classes, self.image_shape = images.root, tuple(classes), (size, size, 3)
        self.images, self.problems = images, UnreadableImages(len(images.paths), max_unreadable)
        self._size, self._flip, self._whole = size, flip, whole
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

    def name_of(self, index: int) -> tuple[str, str]:
        return self.images.path(index), self.classes[self.images.labels[index]]

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
                f"{self.name}: as many images as when the run began, but not the same files or content; a run can only "
                f"be resumed with the same images. Put them back, or start a new run."
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
            everything = (0.0, 0.0, float(full[0]), float(full[1]))
            if augmentation is None:
                return Crop(everything if self._whole else middle_box(full), shape)
            # An image's dice are its own: they do not depend on the batch that it is in.
            rng = np.random.default_rng([*augmentation, index])
            box = everything if self._whole else random_box(full, rng)
            return Crop(box, shape, self._flip and rng.random() < 0.5)

        return self._cache.read(index, choose) if self._cache else read_crop(self.images.path(index), choose)


def open_image_folder(
    root: Path,
    size: int,
    flip: bool,
    workers: int,
    max_unreadable: float,
    *,
    cache: bool = False,
    whole: bool = False,
    splits: Sequence[str] = ("train", "val"),
) -> list[ImageFolder]:
    """The images of each split below `root`.

    Args:
        root: of the tree.
        size: side in pixels that crops are resized to.
        flip: whether training images are mirrored at random.
        workers: threads that fill the cache.
        max_unreadable: share of the images of a split that may be unreadable.
        cache: whether to decode all images now, and keep them in memory with their shorter side at `size` * 8/7, of
            which the middle of `size` is tested on: 256 for 224.
        whole: whether whole images are resized, and not crops.
        splits: those that are needed.

    Raises:
        UsageError: the tree is not as it should be, too many images can not be read, or they do not fit memory.
    """
    classes, found = list_tree(root, splits)
    folders = [ImageFolder(images, classes, size, flip, max_unreadable, whole) for images in found]
    if cache:
        caches = cached(found, round(size / MIDDLE), workers)
        for folder, memory in zip(folders, caches, strict=True):
            folder.report(memory.unreadable)
            folder.use(memory)
    return folders
