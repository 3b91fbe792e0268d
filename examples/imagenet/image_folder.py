"""Images from folders or shards, decoded when they are needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import UsageError
from examples.common.skipped import SkippedFiles, UnusableFileError
from examples.imagenet.augmentation import MIDDLE, Crop, middle_box, random_box
from examples.imagenet.cache import CachedImages, cached
from examples.imagenet.data import Augmentation, Batch, Dataset, Loaded, Unreadable
from examples.imagenet.decoding import read_crop
from examples.imagenet.image_records import ImageRecords, open_image_records
from examples.imagenet.image_tree import Images, list_tree


class ImageFolder(Dataset):
    """One split of a tree `SPLIT/CLASS/*.jpg|png|...`, or of shards.

    Training: a random crop and perhaps its mirror image; else the middle of the image. Every crop, or the `whole`
    image, is resized to `size`. In training the image after it takes the place of one that cannot be read: a blank
    one would count in the batch's normalisation statistics, and a shorter batch would compile another program.
    Otherwise its mask is 0.
    """

    # Of ImageNet, in RGB: https://docs.pytorch.org/vision/stable/models.html.
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(
        self,
        images: Images | ImageRecords,
        classes: Sequence[str],
        size: int,
        flip: bool,
        max_unreadable: float,
        whole: bool = False,
    ) -> None:
        self.name, self.classes, self.image_shape = images.root, tuple(classes), (size, size, 3)
        self.images, self.problems = images, SkippedFiles(len(images), max_unreadable, "--max-unreadable")
        self._size, self._flip, self._whole = size, flip, whole
        self._cache: CachedImages | None = None

    def use(self, cache: CachedImages) -> None:
        """From now on images come from memory."""
        self._cache, self.in_memory = cache, True

    def __len__(self) -> int:
        return len(self.images)

    @property
    def unreadable(self) -> int:
        return len(self.problems)

    def report(self, unreadable: Sequence[Unreadable]) -> None:
        for name, reason in unreadable:
            self.problems.add(name, reason, self.name)

    def name_of(self, index: int) -> tuple[str, str]:
        return os.path.join(self.name, self.images.name(index)), self.classes[self.images.item(index)[1]]

    @functools.cached_property
    def _digest(self) -> str:
        return self.images.digest()

    def state(self) -> dict[str, Any]:
        return super().state() | {"digest": self._digest, "unreadable": sorted(self.problems.reasons)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        if state["digest"] != self._digest:
            raise UsageError(
                f"{self.name}: as many images as when the run began, but not the same files or content; a run can only "
                f"be resumed with the same images. Put them back, or start a new run."
            )
        self.problems.reasons.update(dict.fromkeys(state["unreadable"], "before"))

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
                batch.images[row], batch.labels[row] = self._read(candidate, augmentation)
                return True
            except UnusableFileError as error:
                unreadable.append(Unreadable(self.images.name(candidate), str(error)))
        return False

    def _read(self, index: int, augmentation: Augmentation | None) -> tuple[np.ndarray, int]:
        def choose(full: tuple[int, int]) -> Crop:
            shape = (self._size, self._size)
            everything = (0.0, 0.0, float(full[0]), float(full[1]))
            if augmentation is None:
                return Crop(everything if self._whole else middle_box(full), shape)
            # An image's dice are its own: they do not depend on the batch that it is in.
            rng = np.random.default_rng([*augmentation, index])
            box = everything if self._whole else random_box(full, rng)
            return Crop(box, shape, self._flip and rng.random() < 0.5)

        if self._cache:
            return self._cache.read(index, choose)
        file, label = self.images.item(index)
        return read_crop(file, choose), label


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
    classes: Sequence[str] | None = None,
) -> list[ImageFolder]:
    """The images of each split below `root`: shards where there are any, else a tree of folders.

    Args:
        root: of the data.
        size: side in pixels that crops are resized to.
        flip: whether training images are mirrored at random.
        workers: threads that fill the cache.
        max_unreadable: share of the images of a split that may be unreadable.
        cache: whether to decode all images now, and keep them in memory with their shorter side at `size` * 8/7, of
            which the middle of `size` is tested on: 256 for 224.
        whole: whether whole images are resized, and not crops.
        splits: those that are needed.
        classes: of the model that is tested, where shards may not hold them all.

    Raises:
        UsageError: the data are not as they should be, too many images can't be read, or they don't fit memory.
    """
    classes, found = open_image_records(root, splits, classes) or list_tree(root, splits)
    folders = [ImageFolder(images, classes, size, flip, max_unreadable, whole) for images in found]
    if cache:
        caches = cached(found, round(size / MIDDLE), workers)
        for folder, memory in zip(folders, caches, strict=True):
            folder.report(memory.unreadable)
            folder.use(memory)
    return folders
