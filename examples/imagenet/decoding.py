"""Chooses a crop of an image and reads it with Pillow: upright, in RGB, resized."""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from examples.common.cli import UnusableFileError

# Formats found in files named like JPEGs. Pillow knows more formats, but some of them start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

# Raised by Pillow for files that are not images, are truncated, or claim absurd sizes.
_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
_PILLOW_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error, *_BOMBS)

# Fast downscaling (JPEG decoding at 1/2, 1/4 or 1/8, then box reduction by integers) must leave the crop at least this
# many times larger than the output of the slower, exact filter. The value is Pillow's recommendation for `thumbnail`.
_REDUCING_GAP = 2.0

_ORIENTATION = 0x0112  # the EXIF tag


def read_crop(file: bytes, choose: Callable[[tuple[int, int]], Crop]) -> np.ndarray:
    """Reads a crop of an image.

    Greyscale, palette, CMYK and 16-bit images become RGB. Transparent pixels become white. The EXIF orientation is
    applied.

    Args:
        file: The contents of an image in one of `FORMATS`.
        choose: Returns the crop to read, given the width and height of the upright image.

    Returns:
        The pixels, [height, width, 3], uint8.

    Raises:
        UnusableFileError: The file cannot be read for any reason.
    """
    try:
        with Image.open(io.BytesIO(file), formats=FORMATS) as encoded:
            orientation = _orientation(encoded)
            full = _oriented_size(encoded.size, orientation)
            crop = choose(full)
            _decode_smaller(encoded, full, crop, orientation)
            image = to_rgb(ImageOps.exif_transpose(encoded) if orientation > 1 else encoded)
    except _PILLOW_ERRORS as error:
        raise UnusableFileError(_reason(error)) from error
    return resized(image, crop, full)


def resized(image: Image.Image, crop: Crop, full: tuple[int, int]) -> np.ndarray:
    """The pixels of `crop`, whose box is in pixels of the image of size `full`; `image` is a smaller copy of it."""
    across, down = image.width / full[0], image.height / full[1]
    left, top, right, bottom = crop.box
    box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
    image = image.resize(crop.size, Image.Resampling[crop.interpolation.upper()], box=box, reducing_gap=_REDUCING_GAP)
    # Pillow mirrors whole pixels; NumPy would copy byte by byte, which adds a tenth to the total time.
    return np.asarray(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if crop.mirrored else image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB, with transparent pixels over white."""
    if image.mode.startswith(("I", "F")):
        # 16-bit grey: Pillow's conversion would clip everything above 255 to white.
        image = Image.fromarray(np.clip(np.asarray(image, np.float32) / 257, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if image.mode == "RGB":
        image.load()
        return image  # `convert` would copy
    return image.convert("RGB")


def _decode_smaller(file: Image.Image, full: tuple[int, int], crop: Crop, orientation: int) -> None:
    left, top, right, bottom = crop.box
    width = math.ceil(full[0] * crop.size[0] * _REDUCING_GAP / (right - left))
    height = math.ceil(full[1] * crop.size[1] * _REDUCING_GAP / (bottom - top))
    file.draft(None, _oriented_size((width, height), orientation))  # only JPEG uses the hint


def _orientation(file: Image.Image) -> int:
    # Invalid EXIF data should not make the image unusable, nor turn it: Pillow knows the orientations 1 to 8.
    with contextlib.suppress(*_PILLOW_ERRORS, UserWarning):
        found = int(file.getexif().get(_ORIENTATION, 1))
        return found if found in range(1, 9) else 1
    return 1


def _oriented_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return (size[1], size[0]) if orientation >= 5 else size


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        # Pillow's message only contains the path.
        return f"not a complete {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    return str(error) or type(error).__name__


# The crop of an image that a model sees, random in training and the centre otherwise, and mixup.
#
# Libraries (augmax, dm-pix) crop fully decoded images. This module chooses the crop before a JPEG is decoded, so that
# only the necessary resolution is decoded. RandAugment and CutMix are missing: dm-pix and Albumentations have neither,
# and Keras's layers use their own random generators, so a resumed run would see different images.

# Left, top, right, bottom, in pixels from the upper left corner.
Box = tuple[float, float, float, float]

# Share of the shorter side: 224 of 256, the usual ImageNet evaluation.
MIDDLE = 0.875


class Crop(NamedTuple):
    """A crop of an image, and how to transform it."""

    box: Box
    size: tuple[int, int]  # width and height after resizing
    mirrored: bool = False
    interpolation: str = "bilinear"


class View(NamedTuple):
    """How images become squares: their side in pixels, whole or cropped, the crop of a test, the filter."""

    side: int
    whole: bool = False
    test_crop: float = MIDDLE
    interpolation: str = "bilinear"
    flip: bool = True  # mirrors images of training at random

    def crop(self, rng: np.random.Generator | None = None) -> Callable[[tuple[int, int]], Crop]:
        """A function from the size of an image to its crop: random in training, with a generator, else the centre."""

        def choose(full: tuple[int, int]) -> Crop:
            centre = (0.0, 0.0, float(full[0]), float(full[1])) if self.whole else middle_box(full, self.test_crop)
            box = centre if self.whole or rng is None else random_box(full, rng)
            mirrored = rng is not None and self.flip and rng.random() < 0.5
            return Crop(box, (self.side, self.side), mirrored, self.interpolation)

        return choose


def middle_box(size: tuple[int, int], share: float = MIDDLE) -> Box:
    """The central square whose side is this share of the shorter side."""
    width, height = size
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


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
    return middle_box(size, 1.0)


def erase(key: jax.Array, images: jax.Array, probability: float) -> jax.Array:
    """Sets a rectangle of some images to 0, the mean: 2 % to a third of the area, with aspect ratios of 0.3 to 3.3.

    Source: Zhong et al., "Random Erasing Data Augmentation" (2017), arXiv:1708.04896.
    """
    if not probability:
        return images
    draws = jax.random.uniform(key, (5, len(images), 1))
    area, ratio = 0.02 + 0.31 * draws[0], jnp.exp((2 * draws[1] - 1) * math.log(3.3))
    inside = []
    for length, place, side in zip(images.shape[1:3], draws[2:4], (area * ratio, area / ratio), strict=True):
        share = jnp.minimum(jnp.sqrt(side), 1)
        offset = (jnp.arange(length) + 0.5) / length - place * (1 - share)
        inside.append((offset >= 0) & (offset < share))
    erased = inside[0][:, :, None] & inside[1][:, None, :] & (draws[4] < probability)[..., None]
    return jnp.where(erased[..., None], 0, images)


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
