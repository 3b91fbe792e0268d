"""Images from folders or shards, decoded on demand, and problems with their layout."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from examples.common.cli import SkippedFiles, UnusableFileError, UsageError, listing
from examples.common.records import EXPECTED, SPLITS, Record, Records, content, fingerprint, open_records, read_file
from examples.imagenet.data import Augmentation, Batch, Dataset, empty_batch
from examples.imagenet.decoding import View, read_crop

Fields = tuple[str | None, str | None]  # of the image and the label

# File extensions of the formats that `decoding` reads.
EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif")
_KINDS = ", ".join(EXTENSIONS)
_EXPECTED = f"Expected train/CLASS/*.jpg|png|webp|... and val/CLASS/*.jpg|png|webp|... below it, {EXPECTED}."


class ImageTree(Records):
    """The images of one split in folders, sorted by class and name.

    Args:
        folder: The folder of the split.
        classes: The names of its folders.
        ignored: Counts the files that are not images, by their extension.
    """

    def __init__(self, folder: Path, classes: Sequence[str], ignored: Counter[str]) -> None:
        super().__init__(folder, [])
        found = {name: [*_images_below(str(folder / name), (), ignored)] for name in classes}
        self.entries = [(os.path.relpath(path, folder), name) for name, paths in found.items() for path in paths]

    def __getitem__(self, index: int) -> Record:
        path, name = self.entries[index]
        return {"image": read_file(self.root / path), "label": name}

    def name(self, index: int) -> str:
        return self.entries[index][0]

    def digest(self) -> str:
        """Changes if files are added, removed or renamed, or a sampled file changes; not if the tree is moved."""
        names = [f"{path}\t{name}" for path, name in self.entries]
        return fingerprint(names, len(self), lambda index: self[index]["image"])


def list_tree(root: Path, splits: Sequence[str] = ("train", "val")) -> tuple[list[str], list[ImageTree]]:
    """The classes, in alphabetical order, and the images of each split.

    Raises:
        UsageError: The tree has the wrong layout; the message names the problem and possible fixes.
    """
    flag = f"--data-dir {str(root)!r}"
    if not root.is_dir():
        raise UsageError(f"{flag} is not a folder. {_EXPECTED} The default, digits, needs no download.")
    named = {split: _class_names(root, split) for split in splits}
    classes = named[splits[0]]
    everywhere = set.intersection(*map(set, named.values()))
    differing = {split: sorted({*names} - everywhere) for split, names in named.items()}
    if found := [f"only in {split}: {listing(names)}" for split, names in differing.items() if names]:
        raise UsageError(f"{flag}: the class folders of train and val differ ({'; '.join(found)}).")
    ignored = Counter[str]()
    trees = [ImageTree(split_folder(root, split), classes, ignored) for split in splits]
    for split, images in zip(splits, trees, strict=True):
        if name := min({*classes}.difference(name for _, name in images.entries), default=""):
            where = f"class folder {name!r} of {split}{_contents(images.root / name)}"
            raise UsageError(f"{flag}: no images ({_KINDS}) in {where}; add some, or remove the folder everywhere.")
    if ignored:
        kinds = ", ".join(f"{count} {ending}" for ending, count in ignored.most_common(5))
        print(f"{root}: {ignored.total()} files without an image extension are ignored: {kinds}", file=sys.stderr)
    return classes, trees


def split_folder(root: Path, split: str) -> Path:
    """The folder of a split, which may be `valid` or `test` for `val`."""
    return next((root / word for word in SPLITS[split] if (root / word).is_dir()), root / split)


def _class_names(root: Path, split: str) -> list[str]:
    folder = split_folder(root, split)
    if not folder.is_dir():
        raise UsageError(f"--data-dir {str(root)!r} has no folder {split!r}{_contents(root)}. {_EXPECTED}")
    names = [entry.name for entry in _entries(str(folder)) if _is_folder(entry)]
    if not names:
        raise UsageError(f"--data-dir {str(root)!r}: no class folders in {split!r}{_contents(folder)}. {_EXPECTED}")
    return names


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


# Images with labels: of a tree, or of shards (TFRecord, ArrayRecord, WebDataset, Hugging Face datasets).

# Field names in TensorFlow Datasets, NVIDIA's scripts, WebDataset and the Hugging Face hub.
_IMAGE = ("image/encoded", "image", "img", "jpg", "jpeg", "jpe", "png", "webp", "bmp", "gif")
_LABEL = ("image/class/label", "label", "cls", "class", "fine_label", "txt")


class Source(NamedTuple):
    """The entries of one split, and where each has its image and its label."""

    records: Records
    image: Sequence[str]  # names that the field of the image may have
    label: str  # the field of the label
    names: Sequence[str] | None  # of integer labels; without them, the class name is the number itself


def open_image_records(
    root: Path, splits: Sequence[str], fields: Fields = (None, None), classes: Sequence[str] | None = None
) -> tuple[Sequence[str], list[Source]] | None:
    """The classes and the images of each split; None if there are no shards.

    Class names come from the dataset: a Hugging Face ClassLabel, or labels.txt beside the shards with one name per
    line. Otherwise all labels of the first split are read to collect the names.

    Args:
        root: Root folder of the dataset.
        splits: `train` and `val`, or one of them.
        fields: The fields of the image and the label, if they are not the usual ones.
        classes: Classes of the evaluated model.
    """
    opened = []
    for split in splits:
        records = open_records(root, split) if root.is_dir() else None
        if records is None:
            return None
        label, *_ = records.fields((fields[1],) if fields[1] else _LABEL, "label")
        image = records.fields((fields[0],) if fields[0] else _IMAGE, "image")
        names = records.class_names(label)
        if classes is None:
            classes = names or _sorted({_class_name(value, names) for value in records.column(label)} - {None})
        opened.append(Source(records, image, label, names))
    return classes or (), opened


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
            remedy = "If labels count from 1, add a name for 0 as the first line of labels.txt."
            there = f"there are {len(names)} class names, 0 to {len(names) - 1}. {remedy}"
            raise UsageError(f"the label {text} is out of range: {there}")
        return names[int(text)]
    return text


def _sorted(names: set[Any]) -> list[str]:
    return sorted(names, key=lambda name: (0, int(name), "") if name.isdecimal() else (1, 0, name))


# The images of a split, decoded.


class ImageFolder(Dataset):
    """One split of a tree `SPLIT/CLASS/*.jpg|png|...`, or of shards.

    Training takes a random crop, randomly mirrored; evaluation takes the centre of the image. Every crop, or the
    whole image, is resized. In training the next image replaces an unreadable one: a blank image would distort the
    batch's normalisation statistics, and a shorter batch would need another compilation. In evaluation an unreadable
    image has mask 0.
    """

    # ImageNet's statistics in RGB: https://docs.pytorch.org/vision/stable/models.html.
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def __init__(self, source: Source, classes: Sequence[str], view: View, max_unreadable: float) -> None:
        self.records, self._image, self._label, self._names = source
        self.name, self.classes, self.image_shape = str(self.records.root), tuple(classes), (view.side, view.side, 3)
        self.skipped: SkippedFiles = SkippedFiles(len(self), max_unreadable, "--max-unreadable")
        self._view, self._number_of = view, {name: i for i, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.records)

    def item(self, index: int) -> tuple[bytes, int]:
        """The encoded image and its label; raises `UnusableFileError` if either is missing or invalid."""
        record = self.records[index]
        name = _class_name(record.get(self._label), self._names)
        if name not in self._number_of:
            raise UnusableFileError(f"its label {name!r} is not one of the {len(self.classes)} classes")
        return content(record, self._image), self._number_of[name]

    def name_of(self, index: int) -> tuple[str, str]:
        return os.path.join(self.name, self.records.name(index)), self.classes[self.item(index)[1]]

    @functools.cached_property
    def identity(self) -> str:
        return f"{super().identity} with digest {self.records.digest()[:16]}"

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Batch:
        batch = empty_batch(len(indices), self.image_shape)
        for row, index in enumerate(indices):
            batch.mask[row] = self._fill(batch, row, int(index), augmentation)
        return batch

    def _fill(self, batch: Batch, row: int, index: int, augmentation: Augmentation | None) -> bool:
        # It ends: too many unreadable images are an error.
        for candidate in range(index, index + (1 if augmentation is None else len(self))):
            candidate %= len(self)
            # Seeded per image, so that the crop does not depend on the batch.
            rng = None if augmentation is None else np.random.default_rng([*augmentation, candidate])
            try:
                file, label = self.item(candidate)
                batch.images[row], batch.labels[row] = read_crop(file, self._view.crop(rng)), label
                return True
            except UnusableFileError as error:
                self.skipped.add(self.records.name(candidate), str(error), self.name)
        return False


def open_image_folder(
    root: Path,
    view: View,
    max_unreadable: float,
    splits: Sequence[str] = ("train", "val"),
    fields: Fields = (None, None),
    classes: Sequence[str] | None = None,
) -> list[ImageFolder]:
    """Opens the images of each split below `root`: class folders, beside which archives may lie, or shards.

    Args:
        root: Root folder of the data.
        view: How images become squares.
        max_unreadable: Share of the images of a split that may be unreadable.
        splits: The splits to open.
        fields: The fields of the image and the label in shards, if they are not the usual ones.
        classes: Classes of the evaluated model, since shards may not contain all of them.

    Raises:
        UsageError: The data has the wrong layout, or too many images are unreadable.
    """
    # The folder of a split has folders in it in a tree, and none for shards.
    is_tree = any(path.is_dir() for split in splits for path in split_folder(root, split).glob("*"))
    opened = None if is_tree else open_image_records(root, splits, fields, classes)
    if opened is None:
        classes, trees = list_tree(root, splits)
        if any(fields):
            raise UsageError(f"--image-field and --label-field are for shards, but {str(root)!r} has class folders.")
        opened = classes, [Source(tree, ("image",), "label", None) for tree in trees]
    return [ImageFolder(images, opened[0], view, max_unreadable) for images in opened[1]]
