"""Synthetic images for benchmarks of the model alone."""

from __future__ import annotations

import numpy as np

from examples.imagenet.data import Augmentation, Batch, Dataset, Description, Loaded
from examples.imagenet.models import KINDS


class Synthetic(Dataset):
    """As many random images as in ImageNet, with the shape and classes for which a model was designed."""

    name = "synthetic images"
    in_memory = True

    def __init__(self, model: str, side: int) -> None:
        # A user's model is benchmarked with ImageNet's shape and classes.
        kind = KINDS.get(model, KINDS["resnet50"])
        channels = kind.image_shape[-1]
        self.image_shape = (side, side, channels)
        self.classes = tuple(str(label) for label in range(kind.classes))
        self.mean, self.std = (0.5,) * channels, (0.29,) * channels

    def __len__(self) -> int:
        return 1_281_167

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Loaded:
        return Loaded(random_batch(self, len(indices)))


def random_batch(like: Dataset | Description, size: int) -> Batch:
    """A batch of random noise with the shape of these images."""
    rng = np.random.default_rng(0)
    return Batch(
        rng.integers(0, 256, (size, *like.image_shape), np.uint8),
        rng.integers(0, len(like.classes), size, np.int32),
        np.ones(size, np.float32),
    )
