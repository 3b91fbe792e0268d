"""Encoded images with labels from shards: TFRecord, ArrayRecord, WebDataset, Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import UsageError
from examples.common.records import Records, content
from examples.common.shards import open_records
from examples.common.skipped import UnusableFileError

# Field names in TensorFlow Datasets, NVIDIA's scripts, WebDataset and the Hugging Face hub.
_IMAGE = ("image/encoded", "image", "img", "jpg", "jpeg", "jpe", "png", "webp", "bmp", "gif")
_LABEL = ("image/class/label", "label", "cls", "class", "fine_label", "txt")


class ImageRecords:
    """The images of one split in shards, with the interface of `image_tree.Images`.

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
