"""Decodes images once and keeps them in memory."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from examples.common.cli import UsageError
from examples.common.hosts import say
from examples.common.skipped import UnusableFileError
from examples.imagenet.augmentation import Crop, shorter_side
from examples.imagenet.decoding import image_size, read_crop, resized
from examples.imagenet.image_records import ImageRecords
from examples.imagenet.image_tree import Images

_Images = Images | ImageRecords

# Share of the free memory for images; the rest is left to the program.
_SHARE = 0.9
_MIB = 2**20


class CachedImages:
    """The images of one split at reduced size.

    Args:
        images: The files.
        side: Shorter side of the cached images in pixels; smaller images keep their size.

    Attributes:
        unreadable: Reasons of the unreadable files, by name.
    """

    def __init__(self, images: _Images, side: int) -> None:
        self.unreadable: dict[str, str] = {}
        self._images, self._side = images, side
        self._entries: list[tuple[np.ndarray, int] | None] = [None] * len(images)  # pixels and label

    @property
    def bytes(self) -> int:
        return sum(entry[0].nbytes for entry in self._entries if entry)

    def bytes_needed(self, index: int) -> int:
        """Bytes of an image according to its header; 0 if it can't be read."""
        try:
            return 3 * math.prod(shorter_side(image_size(self._images.item(index)[0]), self._side))
        except UnusableFileError:
            return 0

    def fill(self, index: int) -> None:
        """Decodes one image; safe to call from several threads for different images."""
        try:
            file, label = self._images.item(index)
            pixels = read_crop(file, lambda full: Crop((0, 0, *full), shorter_side(full, self._side)))
            self._entries[index] = pixels, label
        except UnusableFileError as error:
            self.unreadable[self._images.name(index)] = str(error)

    def read(self, index: int, choose: Callable[[tuple[int, int]], Crop]) -> tuple[np.ndarray, int]:
        """The crop as from `decoding.read_crop`, taken from the smaller copy in memory, and the label."""
        entry = self._entries[index]
        if entry is None:
            raise UnusableFileError("it was unreadable when the cache was filled")
        image = Image.fromarray(entry[0])
        return resized(image, choose(image.size), image.size), entry[1]


def cache_images(splits: Sequence[_Images], side: int, workers: int) -> list[CachedImages]:
    """Decodes the images of each split into memory, in `workers` threads.

    Raises:
        UsageError: The images do not fit in memory; raised before any image is decoded.
    """
    started = time.perf_counter()
    caches = [CachedImages(images, side) for images in splits]
    with ThreadPoolExecutor(workers, "cache") as executor:
        pairs = list(zip(splits, caches, strict=True))
        needed = sum(sum(executor.map(cache.bytes_needed, range(len(images)))) for images, cache in pairs)
        _check_fits(needed, splits, side)
        for images, cache in pairs:
            todo = range(len(images))
            for _ in tqdm(executor.map(cache.fill, todo), f"cache {images.root}", len(todo), leave=False):
                pass
    total = sum(cache.bytes for cache in caches) / _MIB
    count = sum(len(images) for images in splits)
    say(f"cache: {count:,} images in {total:,.1f} MiB of memory, in {time.perf_counter() - started:.1f} s")
    return caches


def _check_fits(needed: int, splits: Sequence[_Images], side: int) -> None:
    available = available_memory()
    if available is None or needed <= available * _SHARE:
        return
    count = sum(len(images) for images in splits)
    raise UsageError(
        f"--cache: {count:,} images with a shorter side of {side} pixels need {needed / _MIB:,.1f} MiB, but only "
        f"{_SHARE:.0%} of the {available / _MIB:,.1f} MiB of free memory may hold images. Leave out "
        "--cache, or give a smaller --image-size."
    )


def available_memory() -> int | None:
    """Bytes that this process can still allocate within its container's limit; None if the system reports none."""
    found = [_meminfo(), _control_group()]
    known = [value for value in found if value is not None]
    return min(known) if known else None


def _meminfo() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        try:  # not Linux: the total memory is the best estimate
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, ValueError, OSError):
            return None


def _control_group(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left of a container's memory (control groups version 2, then version 1)."""
    for limit, used, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            # The page cache counts as used, but the kernel frees it on demand.
            lines = (root / statistics).read_text().splitlines()
            files = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
            return int((root / limit).read_text()) - int((root / used).read_text()) + files
        except (OSError, ValueError, StopIteration):
            continue  # no such file, or no limit ("max")
    return None
