"""Images from folders or shards, decoded on demand, and problems with their layout."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import SkippedFiles, UnusableFileError, UsageError, listing
from examples.common.records import EXPECTED, SPLITS, Records, content, fingerprint, open_records
from examples.imagenet.data import Augmentation, Batch, Dataset, empty_batch
from examples.imagenet.decoding import Crop, View, read_crop

# File extensions of the formats that `decoding` reads.
EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif")
_KINDS = ", ".join(EXTENSIONS)
_EXPECTED = f"Expected train/CLASS/*.jpg|png|webp|... and val/CLASS/*.jpg|png|webp|... below it, {EXPECTED}."


@dataclasses.dataclass(frozen=True)
class Images:
    """The images of one split, sorted by class and name."""

    root: str
    paths: list[str]  # relative to `root`
    labels: np.ndarray  # [images], int32

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """The path of an image relative to `root`."""
        return self.paths[index]

    def item(self, index: int) -> tuple[str, int]:
        """The path of an image, and its label."""
        return os.path.join(self.root, self.paths[index]), int(self.labels[index])

    def digest(self) -> str:
        """Changes if files are added, removed or renamed, or a sampled file changes; not if the tree is moved."""
        names = [f"{path}\t{label}" for path, label in zip(self.paths, self.labels, strict=True)]
        return fingerprint(names, len(self), lambda index: Path(self.item(index)[0]).read_bytes())


def list_tree(root: Path, splits: Sequence[str] = ("train", "val")) -> tuple[list[str], list[Images]]:
    """The classes, in alphabetical order, and the images of each split.

    Raises:
        UsageError: The tree has the wrong layout; the message names the problem and possible fixes.
    """
    flag = f"--data-dir {str(root)!r}"
    if not root.is_dir():
        raise UsageError(f"{flag} is not a folder. {_EXPECTED} The default, digits, needs no download.")
    named = {split: _class_names(root, split) for split in splits}
    classes = named[splits[0]]
    for other in splits[1:]:
        differing = {splits[0]: set(classes) - set(named[other]), other: set(named[other]) - set(classes)}
        if found := [f"only in {split}: {listing(sorted(names))}" for split, names in differing.items() if names]:
            raise UsageError(f"{flag}: the class folders of train and val differ ({'; '.join(found)}).")
    ignored, listed = Counter[str](), []
    for split in splits:
        folder = split_folder(root, split)
        images = _list_images(folder, classes, ignored)
        for label in sorted(set(range(len(classes))) - set(images.labels.tolist())):
            raise UsageError(
                f"{flag}: no images ({_KINDS}) in class folder {classes[label]!r} of {split}"
                f"{_contents(folder / classes[label])}; add some, or remove the folder everywhere."
            )
        listed.append(images)
    if ignored:
        kinds = ", ".join(f"{count} {ending}" for ending, count in ignored.most_common(5))
        print(f"{root}: {ignored.total()} files without an image extension are ignored: {kinds}", file=sys.stderr)
    return classes, listed


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split, which may be `valid` or `test` for `val`."""
    return next((root / word for word in SPLITS[split] if (root / word).is_dir()), root / split)


def has_class_folders(root: Path, split: str) -> bool:
    """Whether the folder of a split has folders in it, as a tree has and shards have not."""
    folder = split_folder(root, split)
    return folder.is_dir() and any(path.is_dir() for path in folder.iterdir())


def _class_names(root: Path, split: str) -> list[str]:
    folder = split_folder(root, split)
    if not folder.is_dir():
        raise UsageError(f"--data-dir {str(root)!r} has no folder {split!r}{_contents(root)}. {_EXPECTED}")
    names = [entry.name for entry in _entries(str(folder)) if _is_folder(entry)]
    if not names:
        raise UsageError(f"--data-dir {str(root)!r}: no class folders in {split!r}{_contents(folder)}. {_EXPECTED}")
    return names


def _list_images(split: Path, classes: Sequence[str], ignored: Counter[str]) -> Images:
    found = [[*_images_below(str(split / name), (), ignored)] for name in classes]
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), [len(paths) for paths in found])
    return Images(str(split), [path[len(f"{split}{os.sep}") :] for paths in found for path in paths], labels)


def _images_below(folder: str, above: tuple[tuple[int, int], ...], ignored: Counter[str]) -> Iterator[str]:
    """Paths of the images in a folder and in its subfolders.

    Args:
        folder: The folder to search.
        above: Device and inode numbers of all folders that enclose it, to detect cycles of links.
        ignored: Counts the files that are not images, keyed by extension.
    """
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise UsageError(f"--data-dir: the folder {folder!r} contains itself through a symbolic link; remove the link.")
    for entry in _entries(folder):
        if entry.name.lower().endswith(EXTENSIONS):
            yield entry.path
        elif _is_folder(entry):
            yield from _images_below(entry.path, (*above, identity), ignored)
        else:
            ignored[os.path.splitext(entry.name)[1].lower() or "without an extension"] += 1


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"--data-dir: the folder {folder!r} cannot be read: {error.strerror}.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat()  # follows links: `is_dir` alone would treat a broken link as a file
        return entry.is_dir()
    except OSError as error:
        raise UsageError(f"--data-dir: {entry.path!r} is a broken link ({error.strerror}); remove it.") from error


def _contents(folder: Path) -> str:
    names = [entry.name for entry in _entries(str(folder))]
    return f" (it holds {listing(names)})" if names else " (it is empty)"


# Encoded images with labels from shards: TFRecord, ArrayRecord, WebDataset, Hugging Face datasets.

# Field names in TensorFlow Datasets, NVIDIA's scripts, WebDataset and the Hugging Face hub.
_IMAGE = ("image/encoded", "image", "img", "jpg", "jpeg", "jpe", "png", "webp", "bmp", "gif")
_LABEL = ("image/class/label", "label", "cls", "class", "fine_label", "txt")


class ImageRecords:
    """The images of one split in shards, with the interface of `Images`.

    Args:
        records: The entries.
        fields: Names that the image field may have, and the name of the label field.
        names: Class names of integer labels; without it, the class name is the number itself.
        classes: Class names in the order of the model's outputs.
    """

    def __init__(
        self, records: Records, fields: tuple[Sequence[str], str], names: Sequence[str] | None, classes: Sequence[str]
    ) -> None:
        self.root = str(records.root)
        self._records, self._fields, self._names = records, fields, names
        self._index = {name: index for index, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        """The location of an image relative to `root`."""
        return self._records.name(index)

    def item(self, index: int) -> tuple[bytes, int]:
        """The encoded image and its label; raises `UnusableFileError` if either is missing or invalid."""
        record = self._records[index]
        image = content(record, self._fields[0])
        name = _class_name(record.get(self._fields[1]), self._names)
        if name not in self._index:
            raise UnusableFileError(f"its label {name!r} is not one of the {len(self._index)} classes")
        return image, self._index[name]

    def digest(self) -> str:
        """A digest that changes if shards are added, removed or resized, or if a sampled entry changes."""
        return self._records.digest()


def open_image_records(
    root: Path,
    splits: Sequence[str],
    classes: Sequence[str] | None = None,
    image_field: str | None = None,
    label_field: str | None = None,
) -> tuple[list[str], list[ImageRecords]] | None:
    """The classes and the images of each split; None if there are no shards.

    Class names come from the dataset: a Hugging Face ClassLabel, or labels.txt beside the shards with one name per
    line. Otherwise all labels of the first split are read to collect the names.

    Args:
        root: Root folder of the dataset.
        splits: `train` and `val`, or one of them.
        classes: Classes of the evaluated model.
        image_field, label_field: Names of the fields, if they are not the usual ones.
    """
    if not root.is_dir():
        return None
    opened = []
    for split in splits:
        records = open_records(root, split)
        if records is None:
            return None
        label, *_ = records.fields((label_field,) if label_field else _LABEL, "label")
        fields = records.fields((image_field,) if image_field else _IMAGE, "image"), label
        names = records.class_names(fields[1])
        if classes is None:
            classes = names or _sorted({_class_name(value, names) for value in records.column(fields[1])} - {None})
        opened.append((records, fields, names))
    return list(classes or ()), [ImageRecords(*found, classes or ()) for found in opened]


def _class_name(value: Any, names: Sequence[str] | None) -> str | None:
    """The class name of a label, which is an integer, its digits, or a name.

    Raises:
        UsageError: The label is a list, or an integer without a name. A shifted numbering would rename every class.
    """
    if isinstance(value, (list, tuple, np.ndarray)):
        if len(value) != 1:
            raise UsageError(f"the label {list(value)} is a list: this script trains on one class for each image.")
        (value,) = value
    text = value.decode(errors="replace").strip() if isinstance(value, bytes) else str(value).strip()
    if not text or value is None:
        return None
    if names and text.removeprefix("-").isdecimal():
        if not 0 <= int(text) < len(names):
            raise UsageError(
                f"the label {text} is out of range: there are {len(names)} class names, 0 to {len(names) - 1}. If "
                "labels count from 1, add a name for 0 as the first line of labels.txt."
            )
        return names[int(text)]
    return text


def _sorted(names: set[Any]) -> list[str]:
    return sorted(names, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))


# The images of a split, decoded.

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
        self.images = images
        self.problems: SkippedFiles = SkippedFiles(len(images), max_unreadable, "--max-unreadable")
        self._size, self._flip, self._view = size, flip, view

    def __len__(self) -> int:
        return len(self.images)

    def name_of(self, index: int) -> tuple[str, str]:
        return os.path.join(self.name, self.images.name(index)), self.classes[self.images.item(index)[1]]

    @functools.cached_property
    def identity(self) -> str:
        return f"{super().identity} with digest {self.images.digest()[:16]}"

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
    if not opened and (image_field or label_field):
        raise UsageError(f"--image-field and --label-field are for shards, but {str(root)!r} has class folders.")
    return [ImageFolder(images, classes, size, flip, max_unreadable, view) for images in found]
