"""Which images a tree `train/CLASS/*.jpg` and `val/CLASS/*.jpg` holds, and what is wrong with it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.common.cli import UsageError, listing

EXTENSIONS = (".jpg", ".jpeg", ".png")
_KINDS = ", ".join(EXTENSIONS)
_EXPECTED = "Expected train/CLASS/*.jpg|jpeg|png and val/CLASS/*.jpg|jpeg|png below it."


class Images(NamedTuple):
    """The images of one split, class by class, in order of their names."""

    root: str
    paths: list[str]  # below `root`
    labels: np.ndarray  # [images], int32

    def path(self, index: int) -> str:
        return os.path.join(self.root, self.paths[index])

    def digest(self) -> str:
        """Changes where a file is added, removed or renamed; not where the tree is moved."""
        names = "\n".join(f"{path}\t{label}" for path, label in zip(self.paths, self.labels, strict=True))
        return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()


def list_tree(root: Path) -> tuple[list[str], Images, Images]:
    """The classes, in alphabetical order, and the images of train and of val.

    Raises:
        UsageError: something about the tree is not as it should be; it says what, and the ways out.
    """
    if not root.is_dir():
        raise UsageError(f"--data-dir {str(root)!r} is not a folder. {_EXPECTED} Without it: the digits, no download.")
    classes = _class_names(root, "train")
    _check_same_classes(root, classes, _class_names(root, "val"))
    train, val = (_list_images(root / split, classes) for split in ("train", "val"))
    for label in sorted(set(range(len(classes))) - set(train.labels.tolist())):
        raise UsageError(
            f"--data-dir {str(root)!r}: no images ({_KINDS}) in class folder {classes[label]!r} of train"
            f"{_contents(root / 'train' / classes[label])}; add some, or remove the folder in train and val."
        )
    if not val.paths:
        raise UsageError(f"--data-dir {str(root)!r}: no images ({_KINDS}) in val/CLASS.")
    return classes, train, val


def _class_names(root: Path, split: str) -> list[str]:
    folder = root / split
    if not folder.is_dir():
        raise UsageError(f"--data-dir {str(root)!r} has no folder {split!r}{_contents(root)}. {_EXPECTED}")
    names = [entry.name for entry in _entries(str(folder)) if _is_folder(entry)]
    if not names:
        raise UsageError(f"--data-dir {str(root)!r}: no class folders in {split!r}{_contents(folder)}. {_EXPECTED}")
    return names


def _check_same_classes(root: Path, train: list[str], val: list[str]) -> None:
    only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    if only_train or only_val:
        where = [(only_train, "only in train"), (only_val, "only in val")]
        found = "; ".join(f"{what}: {listing(names)}" for names, what in where if names)
        raise UsageError(
            f"--data-dir {str(root)!r}: the class folders of train and val differ ({found}). Make them the same."
        )


def _list_images(split: Path, classes: Sequence[str]) -> Images:
    paths: list[str] = []
    labels = []
    for label, name in enumerate(classes):
        found = [path[len(f"{split}{os.sep}") :] for path in _images_below(str(split / name), ())]
        paths += found
        labels.append(np.full(len(found), label, np.int32))
    return Images(str(split), paths, np.concatenate(labels))


def _images_below(folder: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Paths of the images in a folder and in its subfolders; `above` are those that it is in."""
    status = os.stat(folder)
    own = (status.st_dev, status.st_ino)
    if own in above:
        raise UsageError(
            f"--data-dir: {folder!r} is a folder that it is in itself, by a symbolic link; remove the link."
        )
    for entry in _entries(folder):
        if entry.name.lower().endswith(EXTENSIONS):
            yield entry.path
        elif _is_folder(entry):
            yield from _images_below(entry.path, (*above, own))


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise UsageError(f"--data-dir: the folder {folder!r} can not be read: {error.strerror}.") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        entry.stat()  # of what a link leads to: `is_dir` alone would take a broken one for a file
        return entry.is_dir()
    except OSError as error:
        raise UsageError(f"--data-dir: {entry.path!r} leads nowhere ({error.strerror}); mend or remove it.") from error


def _contents(folder: Path) -> str:
    names = [entry.name for entry in _entries(str(folder))]
    return f" (it holds {listing(names)})" if names else " (it is empty)"
