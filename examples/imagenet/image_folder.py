"""Images from folders or shards, decoded on demand."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import SkippedFiles, UnusableFileError, UsageError
from examples.imagenet.data import Augmentation, Batch, Dataset, empty_batch
from examples.imagenet.decoding import Crop, View, read_crop
from examples.imagenet.image_sources import ImageRecords, Images, has_class_folders, list_tree, open_image_records

_VIEW = View()


class ImageFolder(Dataset):
    """One split of a tree `SPLIT/CLASS/*.jpg|png|...`, or of shards.

    Training takes a random crop, randomly mirrored; evaluation takes the centre of the image. Every crop, or the
    `whole` image, is resized to `size`. In training the next image replaces an unreadable one: a blank image would
    distort the batch's normalisation statistics, and a shorter batch would need another compilation. In evaluation an
    unreadable image has mask 0.
    """

    # ImageNet's statistics in RGB: https://docs.pytorch.org/vision/stable/models.html.
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(
        self,
        images: Images | ImageRecords,
        classes: Sequence[str],
        size: int,
        flip: bool,
        max_unreadable: float,
        view: View = _VIEW,
    ) -> None:
        self.name, self.classes, self.image_shape = images.root, tuple(classes), (size, size, 3)
        self.images, self.problems = images, SkippedFiles(len(images), max_unreadable, "--max-unreadable")
        self._size, self._flip, self._view = size, flip, view

    def __len__(self) -> int:
        return len(self.images)

    @property
    def unreadable(self) -> int:
        return len(self.problems)

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
                f"{self.name}: the files or their content differ from those of the run; a run can only "
                f"be resumed with the same images. Put them back, or start a new run."
            )
        self.problems.reasons.update(dict.fromkeys(state["unreadable"], "before"))

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        batch = empty_batch(len(indices), self.image_shape)
        for row, index in enumerate(indices):
            batch.mask[row] = self._fill(batch, row, int(index), augmentation)
        return batch

    def _fill(self, batch: Batch, row: int, index: int, augmentation: Augmentation | None) -> bool:
        # It ends: too many unreadable images are an error.
        for candidate in range(index, index + (1 if augmentation is None else len(self))):
            candidate %= len(self)
            try:
                batch.images[row], batch.labels[row] = self._read(candidate, augmentation)
                return True
            except UnusableFileError as error:
                self.problems.add(self.images.name(candidate), str(error), self.name)
        return False

    def _read(self, index: int, augmentation: Augmentation | None) -> tuple[np.ndarray, int]:
        def choose(full: tuple[int, int]) -> Crop:
            size = (self._size, self._size)
            if augmentation is None:
                return self._view.of_test(full, size)
            # Seeded per image, so that the crop does not depend on the batch.
            return self._view.of_training(full, size, np.random.default_rng([*augmentation, index]), self._flip)

        file, label = self.images.item(index)
        return read_crop(file, choose), label


def open_image_folder(
    root: Path,
    size: int,
    flip: bool,
    max_unreadable: float,
    *,
    view: View = _VIEW,
    splits: Sequence[str] = ("train", "val"),
    classes: Sequence[str] | None = None,
    image_field: str | None = None,
    label_field: str | None = None,
) -> list[ImageFolder]:
    """Opens the images of each split below `root`: class folders, beside which archives may lie, or shards.

    Args:
        root: Root folder of the data.
        size: Side length in pixels of the resized crops.
        flip: Whether to mirror training images at random.
        max_unreadable: Share of the images of a split that may be unreadable.
        view: How images become squares.
        splits: The splits to open.
        classes: Classes of the evaluated model, since shards may not contain all of them.
        image_field, label_field: Names of the fields in shards, if they are not the usual ones.

    Raises:
        UsageError: The data has the wrong layout, or too many images are unreadable.
    """
    opened: Any = None
    if not any(has_class_folders(root, split) for split in splits):
        opened = open_image_records(root, splits, classes, image_field, label_field)
    classes, found = opened or list_tree(root, splits)
    return [ImageFolder(images, classes, size, flip, max_unreadable, view) for images in found]
