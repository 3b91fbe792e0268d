"""Images from a tree of folders, one per class, decoded by Pillow as they are needed."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm

from examples.common.cli import UsageError, listing
from examples.imagenet.data import Augmentation, Batch, Dataset, Loaded

EXTENSIONS = (".jpg", ".jpeg", ".png")

# What Pillow raises on files that are no images, are cut off, or claim absurd sizes.
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)


class UnreadableImages:
    """Names each unreadable image once on stderr, and ends the run where there are too many.

    Args:
        total: images in the split.
        share: of `total` that may be unreadable; one image always may, unless `share` is 0.
    """

    def __init__(self, total: int, share: float) -> None:
        self._limit = min(max(1, math.floor(total * share)), total - 1) if share else 0
        self._share = share
        self._paths: set[Path] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._paths)

    def add(self, path: Path, error: Exception) -> None:
        with self._lock:
            if path in self._paths:
                return
            self._paths.add(path)
        # Pillow's own words for a file of no known format say no more than its path.
        reason = "no known format" if isinstance(error, UnidentifiedImageError) else str(error)
        tqdm.write(f"skipped, not readable as an image: {path} ({reason})", file=sys.stderr)
        if len(self._paths) > self._limit:
            raise UsageError(
                f"{len(self._paths)} images can not be read, the last one {str(path)!r} ({reason}); at most "
                f"{self._limit} may be skipped. Repair or remove them, or raise --max-unreadable {self._share}."
            )


class ImageFolder(Dataset):
    """One split of a tree `SPLIT/CLASS/*.jpg|jpeg|png`, classes in alphabetical order.

    Training: a random crop and perhaps its mirror image; else the middle of the image. Every crop
    is resized to `size`. Greyscale, palette, CMYK and 16-bit images become RGB; what is
    transparent becomes white.
    """

    # Of ImageNet, in RGB: https://docs.pytorch.org/vision/stable/models.html.
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(
        self,
        name: str,
        files: Sequence[tuple[Path, int]],
        classes: Sequence[str],
        size: int,
        flip: bool,
        workers: int,
        max_unreadable: float,
    ) -> None:
        self.name, self.classes, self.image_shape = name, tuple(classes), (size, size, 3)
        self._files, self._size, self._flip = list(files), size, flip
        self._unreadable = UnreadableImages(len(files), max_unreadable)
        self._executor = ThreadPoolExecutor(workers, "decode")

    @property
    def unreadable(self) -> int:
        return len(self._unreadable)

    in_memory = True  # it has threads of its own

    def __len__(self) -> int:
        return len(self._files)

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Loaded:
        images = list(self._executor.map(lambda index: self._load_one(int(index), augmentation), indices))
        readable = np.array([image is not None for image in images])
        if augmentation is not None and not readable.all():
            return self._without_holes(indices, readable, augmentation)
        blank = np.zeros(self.image_shape, np.uint8)
        return Loaded(
            Batch(
                np.stack([blank if image is None else image for image in images]),
                np.array([self._files[index][1] for index in indices], np.int32),
                readable.astype(np.float32),
            )
        )

    def _without_holes(self, indices: np.ndarray, readable: np.ndarray, augmentation: Augmentation) -> Loaded:
        """The batch with the image after it in place of each unreadable one.

        A blank image would count in the batch's normalisation statistics, and a shorter batch
        would compile another program. The neighbour is known without reading anything else, so
        the order stays the same in a resumed run.
        """
        indices = np.where(readable, indices, (indices + 1) % len(self))
        return self.load(indices, augmentation)

    def _load_one(self, index: int, augmentation: Augmentation | None) -> np.ndarray | None:
        path = self._files[index][0]
        try:
            with Image.open(path) as file:
                image = to_rgb(file)
        except _UNREADABLE as error:
            self._unreadable.add(path, error)
            return None
        rng = None if augmentation is None else np.random.default_rng([*augmentation, index])
        box = middle_box(image.size) if rng is None else random_box(image.size, rng)
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
        if rng is not None and self._flip and rng.random() < 0.5:
            image = ImageOps.mirror(image)
        return np.asarray(image)


def open_image_folder(
    root: Path, size: int, flip: bool, workers: int, max_unreadable: float
) -> tuple[ImageFolder, ImageFolder]:
    """The training and the test images below `root`."""
    classes = _class_names(root / "train", root)
    test_classes = _class_names(root / "val", root)
    _check_same_classes(root, classes, test_classes)
    files = {split: _list_images(root / split, classes) for split in ("train", "val")}
    empty = sorted(set(classes) - {classes[label] for _, label in files["train"]})
    if empty:
        raise UsageError(
            f"--data-dir {str(root)!r}: no images ({', '.join(EXTENSIONS)}) in class folder "
            f"{listing(empty)} of train; add some, or remove the folder in train and val."
        )
    if not files["val"]:
        raise UsageError(f"--data-dir {str(root)!r}: no images ({', '.join(EXTENSIONS)}) in val/CLASS.")
    train, test = (
        ImageFolder(str(root / split), files[split], classes, size, flip, workers, max_unreadable)
        for split in ("train", "val")
    )
    return train, test


def _class_names(folder: Path, root: Path) -> list[str]:
    expected = "Expected train/CLASS/*.jpg|jpeg|png and val/CLASS/*.jpg|jpeg|png below it."
    if not root.is_dir():
        raise UsageError(f"--data-dir {str(root)!r} is not a folder. {expected} Without it: the digits, no download.")
    if not folder.is_dir():
        raise UsageError(f"--data-dir {str(root)!r} has no folder {folder.name!r}. {expected}")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise UsageError(f"--data-dir {str(root)!r}: no class folders in {folder.name!r}. {expected}")
    return names


def _check_same_classes(root: Path, train: list[str], test: list[str]) -> None:
    only_train, only_test = sorted(set(train) - set(test)), sorted(set(test) - set(train))
    if only_train or only_test:
        where = [(only_train, "only in train"), (only_test, "only in val")]
        found = "; ".join(f"{what}: {listing(names)}" for names, what in where if names)
        raise UsageError(
            f"--data-dir {str(root)!r}: the class folders of train and val differ ({found}). Make them the same."
        )


def _list_images(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    return [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in EXTENSIONS and not path.name.startswith(".")
    ]


def to_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB, upright as its EXIF says, over white where it is transparent."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith(("I", "F")):
        # 16-bit grey: Pillow's own conversion would clip everything above 255 to white.
        image = Image.fromarray(np.clip(np.asarray(image, np.float32) / 257, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def middle_box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """The square in the middle, 7/8 of the shorter side: 224 of 256, as ImageNet is tested."""
    width, height = size
    side = min(width, height) * 0.875
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(size: tuple[int, int], rng: np.random.Generator) -> tuple[float, float, float, float]:
    """A box of 8 % to 100 % of the area and a ratio of 3:4 to 4:3 (Szegedy et al., 2014)."""
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if box_width <= width and box_height <= height:
            left, top = rng.uniform(0, width - box_width), rng.uniform(0, height - box_height)
            return left, top, left + box_width, top + box_height
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
