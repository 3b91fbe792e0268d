"""Reads a crop of an image with Pillow: upright, in RGB, at the requested size."""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections.abc import Callable

import numpy as np
from PIL import Image, UnidentifiedImageError

from examples.common.skipped import UnusableFileError
from examples.imagenet.augmentation import Crop

# Formats found in files named like JPEGs. Pillow knows more formats, but some of them start other programs.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")

# Raised by Pillow for files that are not images, are truncated, or claim absurd sizes.
_PILLOW_ERRORS = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)

# Fast downscaling (JPEG decoding at 1/2, 1/4 or 1/8, then box reduction by integers) must leave the crop at least this
# many times larger than the output of the slower, exact filter. The value is Pillow's recommendation for `thumbnail`.
_REDUCING_GAP = 2.0

_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


File = str | bytes  # a path, or the contents of a file


def read_crop(file: File, choose: Callable[[tuple[int, int]], Crop]) -> np.ndarray:
    """Reads a crop of an image.

    Greyscale, palette, CMYK and 16-bit images become RGB. Transparent pixels become white. The EXIF orientation is
    applied.

    Args:
        file: An image in one of `FORMATS`; its name does not matter.
        choose: Returns the crop to read, given the width and height of the upright image.

    Returns:
        The pixels, [height, width, 3], uint8.

    Raises:
        UnusableFileError: The file cannot be read for any reason.
    """
    try:
        with _open_image(file) as encoded:
            orientation = _orientation(encoded)
            full = _oriented_size(encoded.size, orientation)
            crop = choose(full)
            _decode_smaller(encoded, full, crop, orientation)
            image = to_rgb(encoded)
    except _PILLOW_ERRORS as error:
        raise UnusableFileError(_reason(error)) from error
    if orientation in _UPRIGHT:
        image = image.transpose(_UPRIGHT[orientation])
    return resized(image, crop, full)


def image_size(file: File) -> tuple[int, int]:
    """Width and height of the upright image, read from the file header; raises like `read_crop`."""
    try:
        with _open_image(file) as encoded:
            return _oriented_size(encoded.size, _orientation(encoded))
    except _PILLOW_ERRORS as error:
        raise UnusableFileError(_reason(error)) from error


def _open_image(file: File) -> Image.Image:
    return Image.open(file if isinstance(file, str) else io.BytesIO(file), formats=FORMATS)


def resized(image: Image.Image, crop: Crop, full: tuple[int, int]) -> np.ndarray:
    """The pixels of `crop`, whose box is in pixels of the image of size `full`; `image` is a smaller copy of it."""
    across, down = image.width / full[0], image.height / full[1]
    left, top, right, bottom = crop.box
    box = (left * across, top * down, min(right * across, image.width), min(bottom * down, image.height))
    image = image.resize(crop.size, Image.Resampling.BILINEAR, box=box, reducing_gap=_REDUCING_GAP)
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
    # Invalid EXIF data should not make the image unusable.
    with contextlib.suppress(*_PILLOW_ERRORS, UserWarning):
        return int(file.getexif().get(_ORIENTATION, 1))
    return 1


def _oriented_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    return (size[1], size[0]) if orientation >= 5 else size


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        # Pillow's message only contains the path.
        return f"not a complete {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
