"""The images that the flags give: in folders or shards, of an installed package, or synthetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from examples.common.cli import UsageError, listing
from examples.imagenet.config import Config
from examples.imagenet.data import Augmentation, Batch, Dataset, Description
from examples.imagenet.embedded import EMBEDDED
from examples.imagenet.image_folder import open_image_folder
from examples.imagenet.models import KINDS


class Data(NamedTuple):
    """The images of a run, of which some may not be needed, and what a model must know about them."""

    about: Description
    train: Dataset | None = None
    test: Dataset | None = None


def open_data(config: Config, about: Description | None = None) -> Data:
    """Opens the images of the flags; `about` describes those of a trained model, which needs no training images."""
    if about is not None:
        test = None if config.images else _open(config, ["val"], about.classes)[0]
        if test is not None:
            _check_same(about, test)
        return Data(about, None, test)
    if config.data_dir is None and config.is_benchmark:
        images: Dataset = Synthetic(config.model_name, config.side)
        return Data(images.description, images, images)
    train, test = _open(config, ["train", "val"])
    return Data(train.description, train, test)


def _open(config: Config, splits: Sequence[str], classes: Sequence[str] | None = None) -> Sequence[Dataset]:
    if config.data_dir is None:
        return [EMBEDDED[config.embedded]("train" if split == "train" else "test") for split in splits]
    options: dict[str, Any] = {"cache": config.cache, "whole": config.whole, "splits": splits, "classes": classes}
    options |= {"image_field": config.image_field, "label_field": config.label_field}
    return open_image_folder(
        config.data_dir, config.side, config.flip, config.workers, config.max_unreadable, **options
    )


def _check_same(about: Description, images: Dataset) -> None:
    if tuple(images.classes) != about.classes:
        raise UsageError(
            f"the model has the classes {listing(about.classes)}, but {images.name} has {listing(images.classes)}. "
            "Give the --data-dir that it was trained on, or one with the same class folders."
        )
    if images.image_shape != about.image_shape:
        raise UsageError(f"the model takes images of {about.image_shape}, but {images.name} has {images.image_shape}.")


class Synthetic(Dataset):
    """As many random images as in ImageNet, with the shape and classes for which a model was designed."""

    name = "synthetic images"

    def __init__(self, model: str, side: int) -> None:
        # A user's model is benchmarked with ImageNet's shape and classes.
        kind = KINDS.get(model, KINDS["resnet50"])
        channels = kind.image_shape[-1]
        self.image_shape = (side, side, channels)
        self.classes = tuple(str(label) for label in range(kind.classes))
        self.mean, self.std = (0.5,) * channels, (0.29,) * channels

    def __len__(self) -> int:
        return 1_281_167

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        return random_batch(self, len(indices))


def random_batch(like: Dataset | Description, size: int) -> Batch:
    """A batch of random noise with the shape of these images."""
    rng = np.random.default_rng(0)
    return Batch(
        rng.integers(0, 256, (size, *like.image_shape), np.uint8),
        rng.integers(0, len(like.classes), size, np.int32),
        np.ones(size, np.float32),
    )
