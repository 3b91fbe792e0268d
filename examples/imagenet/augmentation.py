"""The crop of an image that a model sees, random in training and the centre otherwise, and mixup.

Libraries (augmax, dm-pix) crop fully decoded images. This module chooses the crop before a JPEG is decoded, so that
only the necessary resolution is decoded. RandAugment and CutMix are missing: dm-pix and Albumentations have neither,
and Keras's layers use their own random generators, so a resumed run would see different images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

# Left, top, right, bottom, in pixels from the upper left corner.
Box = tuple[float, float, float, float]

# Share of the shorter side: 224 of 256, the usual ImageNet evaluation.
MIDDLE = 0.875


class Crop(NamedTuple):
    """A crop of an image, and how to transform it."""

    box: Box
    size: tuple[int, int]  # width and height after resizing
    mirrored: bool = False


def middle_box(size: tuple[int, int]) -> Box:
    """The central square with a side of 7/8 of the shorter side."""
    return _middle_square(size, MIDDLE)


def random_box(size: tuple[int, int], rng: np.random.Generator) -> Box:
    """A random box with 8 % to 100 % of the area and an aspect ratio of 3:4 to 4:3.

    Source: Szegedy et al., "Going Deeper with Convolutions" (2014), arXiv:1409.4842, section 6.
    """
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if box_width <= width and box_height <= height:
            left, top = rng.uniform(0, width - box_width), rng.uniform(0, height - box_height)
            return left, top, left + box_width, top + box_height
    return _middle_square(size, 1.0)


def shorter_side(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Width and height that scale the shorter side to `side`; smaller images keep their size."""
    scale = min(1.0, side / min(size))
    width, height = (max(1, round(length * scale)) for length in size)
    return width, height


def _middle_square(size: tuple[int, int], share: float) -> Box:
    width, height = size
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def mix_up(key: jax.Array, alpha: float, batch_size: int) -> Callable[[jax.Array], jax.Array]:
    """A function that blends each entry of a batch with another (Zhang et al., 2017, https://arxiv.org/abs/1710.09412).

    Args:
        key: Random key.
        alpha: Parameter of the Beta distribution from which the batch's one weight is drawn; 0 disables blending.
        batch_size: Number of entries.

    Returns:
        A function of arrays [batch_size, ...], to apply to both images and targets.
    """
    if not alpha:
        return lambda x: x
    draw, permute = jax.random.split(key)
    weight = jax.random.beta(draw, alpha, alpha)
    others = jax.random.permutation(permute, batch_size)
    return lambda x: weight * x + (1 - weight) * x[others]
