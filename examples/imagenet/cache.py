"""Decodes images once and keeps them in memory."""

from __future__ import annotations

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
    """The images of one split, concatenated in a single array.

    Args:
        images: The files.
        sizes: Width and height of each cached image; (0, 0) if its file cannot be read.
        unreadable: Reasons of the unreadable files so far, by name.
    """

    def __init__(self, images: _Images, sizes: np.ndarray, unreadable: dict[str, str]) -> None:
        self.unreadable = unreadable
        self._images, self._sizes = images, sizes
        self._ends = np.cumsum(np.prod(sizes, axis=1) * 3)
        self._pixels = np.empty(self._ends[-1], np.uint8)
        self._labels = np.zeros(len(images), np.int32)

    @property
    def mebibytes(self) -> float:
        return self._pixels.nbytes / _MIB

    def fill(self, index: int) -> None:
        """Decodes one image; safe to call from several threads for different images."""
        if not self._sizes[index].any():
            return
        width, height = (int(length) for length in self._sizes[index])
        try:
            file, self._labels[index] = self._images.item(index)
            self._view(index)[:] = read_crop(file, lambda full: Crop((0, 0, *full), (width, height)))
        except UnusableFileError as error:
            self._sizes[index] = 0
            self.unreadable[self._images.name(index)] = str(error)

    def read(self, index: int, choose: Callable[[tuple[int, int]], Crop]) -> tuple[np.ndarray, int]:
        """The crop as from `decoding.read_crop`, taken from the smaller copy in memory, and the label."""
        if not self._sizes[index].any():
            raise UnusableFileError("it was unreadable when the cache was filled")
        image = Image.fromarray(self._view(index))
        return resized(image, choose(image.size), image.size), int(self._labels[index])

    def _view(self, index: int) -> np.ndarray:
        width, height = self._sizes[index]
        start = self._ends[index - 1] if index else 0
        return self._pixels[start : self._ends[index]].reshape(height, width, 3)


def cache_images(splits: Sequence[_Images], side: int, workers: int) -> list[CachedImages]:
    """Decodes the images of each split into memory.

    Args:
        splits: The files.
        side: Shorter side of the cached images in pixels; smaller images keep their size.
        workers: Number of decoding threads.

    Raises:
        UsageError: The images do not fit in memory; raised before any image is decoded.
    """
    started = time.perf_counter()
    with ThreadPoolExecutor(workers, "cache") as executor:
        measured = [_measure(images, side, executor) for images in splits]
        _check_fits(sum(int(np.prod(sizes, axis=1).sum()) * 3 for sizes, _ in measured), splits, side)
        caches = [CachedImages(images, *found) for images, found in zip(splits, measured, strict=True)]
        for images, cache in zip(splits, caches, strict=True):
            todo = range(len(images))
            for _ in tqdm(executor.map(cache.fill, todo), f"cache {images.root}", len(todo), leave=False):
                pass
    total = sum(cache.mebibytes for cache in caches)
    count = sum(len(images) for images in splits)
    say(f"cache: {count:,} images in {total:,.1f} MiB of memory, in {time.perf_counter() - started:.1f} s")
    return caches


def _measure(images: _Images, side: int, executor: ThreadPoolExecutor) -> tuple[np.ndarray, dict[str, str]]:
    unreadable: dict[str, str] = {}

    def size_of(index: int) -> tuple[int, int]:
        try:
            return shorter_side(image_size(images.item(index)[0]), side)
        except UnusableFileError as error:
            unreadable[images.name(index)] = str(error)
            return 0, 0

    return np.array(list(executor.map(size_of, range(len(images)))), np.int64), unreadable


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
