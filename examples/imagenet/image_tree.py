"""Lists the images of a tree `train/CLASS/*.jpg`, `val/CLASS/*.jpg`, and reports problems with its layout."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from examples.common.cli import UsageError, listing
from examples.common.fingerprint import fingerprint
from examples.common.shards import EXPECTED, SPLITS

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

    def path(self, index: int) -> str:
        """The path of an image."""
        return os.path.join(self.root, self.paths[index])

    def name(self, index: int) -> str:
        """The path of an image relative to `root`."""
        return self.paths[index]

    def item(self, index: int) -> tuple[str, int]:
        """The path of an image, and its label."""
        return self.path(index), int(self.labels[index])

    def digest(self) -> str:
        """Changes if files are added, removed or renamed, or a sampled file changes; not if the tree is moved."""
        names = [f"{path}\t{label}" for path, label in zip(self.paths, self.labels, strict=True)]
        return fingerprint(names, len(self), lambda index: Path(self.path(index)).read_bytes())


def list_tree(root: Path, splits: Sequence[str] = ("train", "val")) -> tuple[list[str], list[Images]]:
    """The classes, in alphabetical order, and the images of each split.

    Raises:
        UsageError: The tree has the wrong layout; the message names the problem and possible fixes.
    """
    if not root.is_dir():
        raise UsageError(
            f"--data-dir {str(root)!r} is not a folder. {_EXPECTED} The default, digits, needs no download."
        )
    named = {split: _class_names(root, split) for split in splits}
    classes = named[splits[0]]
    if len(splits) > 1:
        _check_same_classes(root, *named.values())
    other = Counter[str]()
    found = [_list_images(split_folder(root, split), classes, other) for split in splits]
    for split, images in zip(splits, found, strict=True):
        if not len(images):
            raise UsageError(f"--data-dir {str(root)!r}: no images ({_KINDS}) in {split}/CLASS.")
        for label in sorted(set(range(len(classes))) - set(images.labels.tolist())):
            raise UsageError(
                f"--data-dir {str(root)!r}: no images ({_KINDS}) in class folder {classes[label]!r} of {split}"
                f"{_contents(split_folder(root, split) / classes[label])}; add some, or remove the folder everywhere."
            )
    if other:
        kinds = ", ".join(f"{count} {ending}" for ending, count in other.most_common(5))
        print(f"{root}: {other.total()} files without an image extension are ignored: {kinds}", file=sys.stderr)
    return classes, found


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


def _check_same_classes(root: Path, train: list[str], val: list[str]) -> None:
    only_train, only_val = sorted(set(train) - set(val)), sorted(set(val) - set(train))
    if only_train or only_val:
        where = [(only_train, "only in train"), (only_val, "only in val")]
        found = "; ".join(f"{what}: {listing(names)}" for names, what in where if names)
        raise UsageError(
            f"--data-dir {str(root)!r}: the class folders of train and val differ ({found}). Make them the same."
        )


def _list_images(split: Path, classes: Sequence[str], other: Counter[str]) -> Images:
    paths: list[str] = []
    labels = []
    for label, name in enumerate(classes):
        found = [path[len(f"{split}{os.sep}") :] for path in _images_below(str(split / name), (), other)]
        paths += found
        labels.append(np.full(len(found), label, np.int32))
    return Images(str(split), paths, np.concatenate(labels))


def _images_below(folder: str, above: tuple[tuple[int, int], ...], other: Counter[str]) -> Iterator[str]:
    """Paths of the images in a folder and in its subfolders.

    Args:
        folder: The folder to search.
        above: Device and inode numbers of all folders that enclose it, to detect cycles of links.
        other: Counts the files that are not images, keyed by extension.
    """
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise UsageError(f"--data-dir: the folder {folder!r} contains itself through a symbolic link; remove the link.")
    for entry in _entries(folder):
        if entry.name.lower().endswith(EXTENSIONS):
            yield entry.path
        elif _is_folder(entry):
            yield from _images_below(entry.path, (*above, identity), other)
        else:
            other[os.path.splitext(entry.name)[1].lower() or "without an extension"] += 1


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
        raise UsageError(
            f"--data-dir: {entry.path!r} is a broken link ({error.strerror}); repair or remove it."
        ) from error


def _contents(folder: Path) -> str:
    names = [entry.name for entry in _entries(str(folder))]
    return f" (it holds {listing(names)})" if names else " (it is empty)"
