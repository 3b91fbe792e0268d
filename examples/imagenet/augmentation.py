"""Chooses the part of an image that a model sees: at random in training, the middle otherwise.

Our own, because the crop must be known before a JPEG is decoded, which happens only as far as it is needed; libraries
(augmax, dm-pix) crop whole decoded images. RandAugment and CutMix are missing: dm-pix and Albumentations have neither,
and Keras's layers draw from generators of their own, so a resumed run would see other images.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

# Left, top, right, bottom, in pixels from the upper left corner.
Box = tuple[float, float, float, float]

# Of the shorter side: 224 of 256, as ImageNet is tested.
MIDDLE = 0.875


class Crop(NamedTuple):
    """A part of an image, and its form afterwards."""

    box: Box
    size: tuple[int, int]  # width and height that it is resized to
    mirrored: bool = False


def middle_box(size: tuple[int, int]) -> Box:
    """The square in the middle, 7/8 of the shorter side."""
    return _middle_square(size, MIDDLE)


def random_box(size: tuple[int, int], rng: np.random.Generator) -> Box:
    """A box of 8 % to 100 % of the area and a ratio of 3:4 to 4:3.

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
    """Width and height with the same ratio whose shorter one is `side`; an image that is smaller stays as it is."""
    scale = min(1.0, side / min(size))
    width, height = (max(1, round(length * scale)) for length in size)
    return width, height


def _middle_square(size: tuple[int, int], share: float) -> Box:
    width, height = size
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
