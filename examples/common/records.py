"""Random access to the entries of shards: TFRecord, ArrayRecord, WebDataset tars, and Hugging Face datasets on disk.

The seed and the step number determine a batch, so entries must be readable in any order. ArrayRecord (read by Grain)
and Arrow files (read by `datasets`) allow that. Readers of the other two (Grain's TFRecordIterDataset, the webdataset
package) read a file from its beginning, so this module builds an index of offsets when it opens the data.
"""

from __future__ import annotations

import abc
import functools
import json
import os
import struct
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from examples.common.cli import UsageError, listing, one_line
from examples.common.fingerprint import fingerprint
from examples.common.skipped import UnusableFileError

Record = dict[str, Any]


class Records(abc.ABC):
    """The entries of one split, each a dictionary of values by field.

    Attributes:
        root: Folder or file of the dataset.
        paths: The files with the entries.
    """

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        self.root, self.paths = root, tuple(paths)

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __getitem__(self, index: int) -> Record:
        """An entry. Raises an `UnusableFileError` if it can't be read."""

    def name(self, index: int) -> str:
        """The name of an entry for messages."""
        return f"entry {index}"

    def column(self, field: str) -> list[Any]:
        """The values of a field in all entries; None for entries that lack it or are damaged."""
        values = []
        for index in tqdm(range(len(self)), f"reading {field} of {self.root}", leave=False):
            try:
                values.append(self._value(index, field))
            except UnusableFileError:
                values.append(None)
        return values

    def _value(self, index: int, field: str) -> Any:
        return self[index].get(field)

    def class_names(self, field: str) -> tuple[str, ...] | None:
        """The class names for the integers of a field; None if the dataset has none."""
        for name in ("labels.txt", "classes.txt", f"{field}.labels.txt"):
            path = (self.root if self.root.is_dir() else self.root.parent) / name
            if path.is_file():
                return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        return None

    def fields(self, candidates: Sequence[str], what: str) -> tuple[str, ...]:
        """The candidates, first the one that the first readable entry has. Entries may have different ones.

        Raises:
            UsageError: The entry has none of them, or no entry is readable.
        """
        for index in range(len(self)):
            try:
                found = self[index]
            except UnusableFileError:
                continue
            if name := next((name for name in candidates if found.get(name) is not None), None):
                return name, *(other for other in candidates if other != name)
            raise UsageError(
                f"{str(self.root)!r}: entries have the fields {listing(list(found), 10)}, and none of "
                f"{', '.join(candidates)} for the {what}; name it with --{what}-field."
            )
        raise UsageError(f"{str(self.root)!r} has no entry that can be read.")

    def digest(self) -> str:
        """A hash that changes if shards are added, removed or resized, or if a sampled entry changes."""

        def sample(index: int) -> bytes:
            try:
                return repr(sorted(self[index].items())).encode()
            except UnusableFileError:
                return b""

        names = [f"{path.name}\t{path.stat().st_size}" for path in self.paths]
        return fingerprint([*names, str(len(self))], len(self), sample)


class Entry(NamedTuple):
    """A file whose content is a field of an entry, used in place of a path."""

    records: Records
    number: int
    fields: tuple[str, ...]  # of which the first that the entry has holds the file

    def __str__(self) -> str:
        return f"{self.records.root}: {self.records.name(self.number)}"

    def read_bytes(self) -> bytes:
        """The content. Raises an `UnusableFileError` if it can't be read."""
        return content(self.records[self.number], self.fields)


def content(record: Record, fields: Sequence[str]) -> bytes:
    """The first of these fields that an entry has, which is a file. Raises an `UnusableFileError` if there is none."""
    found = next((record[name] for name in fields if record.get(name) is not None), None)
    if not isinstance(found, bytes):
        raise UnusableFileError(f"its field {fields[0]!r} holds no file")
    return found


class Examples(Records):
    """Serialised `tf.train.Example`s, as TensorFlow Datasets and NVIDIA's scripts write them."""

    def __init__(self, root: Path, paths: Sequence[Path], source: Any) -> None:
        super().__init__(root, paths)
        self._source = source  # a sequence of bytes

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Record:
        from google.protobuf.message import DecodeError

        try:
            features = example_type().FromString(self._source[index]).features.feature
        except (DecodeError, OSError, RuntimeError, ValueError) as error:
            raise UnusableFileError(f"not a tf.train.Example: {one_line(error, 100)}") from error
        return {name: _feature_value(feature) for name, feature in features.items()}


def _feature_value(feature: Any) -> Any:
    kind = feature.WhichOneof("kind")
    values = list(getattr(feature, kind).value) if kind else []
    return values[0] if len(values) == 1 else values or None


@functools.cache
def example_type() -> Any:
    """Builds the class of `tf.train.Example` without TensorFlow."""
    from google.protobuf import descriptor_pool, json_format, message_factory
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    def field(name: str, number: int, kind: str, label: str = "OPTIONAL", **more: Any) -> dict[str, Any]:
        typed = {"type": "TYPE_MESSAGE", "typeName": f".{package}.{kind}"} if kind[0].isupper() else {"type": kind}
        typed["type"] = typed["type"] if kind[0].isupper() else f"TYPE_{kind.upper()}"
        return {"name": name, "number": number, "label": f"LABEL_{label}", **typed, **more}

    package = "mpjax_examples"
    lists = {"BytesList": "bytes", "FloatList": "float", "Int64List": "int64"}
    kinds = [field(f"{name[:-4].lower()}_list", i, name, oneofIndex=0) for i, name in enumerate(lists, start=1)]
    item = {
        "name": "FeatureEntry",
        "field": [field("key", 1, "string"), field("value", 2, "Feature")],
        "options": {"mapEntry": True},
    }
    messages = [
        *({"name": name, "field": [field("value", 1, kind, "REPEATED")]} for name, kind in lists.items()),
        {"name": "Feature", "field": kinds, "oneofDecl": [{"name": "kind"}]},
        {"name": "Features", "field": [field("feature", 1, "Features.FeatureEntry", "REPEATED")], "nestedType": [item]},
        {"name": "Example", "field": [field("features", 1, "Features")]},
    ]
    file = {"name": f"{package}.proto", "package": package, "syntax": "proto3", "messageType": messages}
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(file, FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.Example"))


class TFRecordFiles(Sequence[bytes]):
    """Random access to the records of uncompressed TFRecord files.

    A record is its length (8 bytes), a checksum of the length (4), the content, and a checksum of the content (4). As
    in Grain, checksums aren't verified. Wrong lengths show at the end of the file, wrong content in the decoder.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        offsets = [_tfrecord_offsets(path) for path in paths]
        self._ends = np.cumsum([len(found) for found in offsets])
        self._offsets = np.concatenate(offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        # Opening the file for each record takes microseconds, is thread-safe, and keeps this object picklable.
        with self._paths[int(np.searchsorted(self._ends, index, side="right"))].open("rb", buffering=0) as file:
            file.seek(int(self._offsets[index]))
            (length,) = struct.unpack("<Q4x", file.read(12))
            return file.read(length)


def _tfrecord_offsets(path: Path) -> np.ndarray:
    size, offsets, place = path.stat().st_size, [], 0
    with path.open("rb", buffering=0) as file:
        while place < size:
            file.seek(place)
            header = file.read(12)
            after = place + 16 + (struct.unpack("<Q", header[:8])[0] if len(header) == 12 else size)
            if after > size:
                raise UsageError(
                    f"{str(path)!r} is not a complete, uncompressed TFRecord file: the record at byte {place} "
                    f"extends beyond its end at {size}. Unpack it, or copy it again."
                )
            offsets.append(place)
            place = after
    return np.array(offsets, np.int64)


def open_array_records(root: Path, paths: Sequence[Path]) -> Examples:
    """The entries of ArrayRecord files."""
    import grain

    try:
        return Examples(root, paths, grain.sources.ArrayRecordDataSource([str(path) for path in paths]))
    except Exception as error:  # The C++ library has no error class for this.
        raise UsageError(f"{str(root)!r}: the ArrayRecord files can't be read: {one_line(error, 200)}") from error


class TarFiles(Records):
    """WebDataset shards. Files that differ only after the first dot of their name are the fields of one entry.

    The values of a `json` file are also fields.
    """

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        super().__init__(root, paths)
        self._entries: list[tuple[str, int, dict[str, tuple[int, int]]]] = []  # name, shard, field: offset and size
        for shard, path in enumerate(paths):
            try:
                self._index(shard, path)
            except (tarfile.TarError, OSError) as error:
                raise UsageError(
                    f"{str(path)!r} is not a complete, uncompressed tar file: {one_line(error)}. "
                    "Unpack it, or copy it again."
                ) from error

    def _index(self, shard: int, path: Path) -> None:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                if not member.isfile() or base.startswith("."):
                    continue
                if member.offset_data + member.size > size:
                    raise tarfile.ReadError(f"{member.name} is cut off")
                stem, _, field = base.partition(".")
                name = os.path.join(folder, stem)
                if not self._entries or self._entries[-1][:2] != (name, shard):
                    self._entries.append((name, shard, {}))
                self._entries[-1][2][sys.intern(field.lower())] = member.offset_data, member.size

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Record:
        return self._read(index)

    def name(self, index: int) -> str:
        name, shard, _ = self._entries[index]
        return f"{self.paths[shard].name}/{name}"

    def _value(self, index: int, field: str) -> Any:
        return self._read(index, (field, "json")).get(field)  # Skip other fields, such as the image.

    def _read(self, index: int, only: Sequence[str] | None = None) -> Record:
        _, shard, places = self._entries[index]
        record: Record = {}
        with self.paths[shard].open("rb", buffering=0) as file:
            for field, (offset, size) in places.items():
                if only is None or field in only:
                    file.seek(offset)
                    record[field] = file.read(size)
        if "json" in record:
            try:
                record = {**json.loads(record["json"]), **record}
            except (ValueError, TypeError) as error:
                raise UnusableFileError(f"its json is invalid: {one_line(error, 100)}") from error
        return record


class HuggingFace(Records):
    """A dataset that `datasets.Dataset.save_to_disk` wrote, or Parquet files of the hub. Media stay encoded."""

    def __init__(self, root: Path, folder: Path | Sequence[Path]) -> None:
        try:
            import datasets
        except ImportError as error:
            raise UsageError(
                f'{str(root)!r} is a Hugging Face dataset: pip install "mpjax[huggingface]" to read it.'
            ) from error
        try:
            if isinstance(folder, Path):
                data: Any = datasets.load_from_disk(str(folder))
            else:
                data = datasets.Dataset.from_parquet([str(path) for path in folder])
        except Exception as error:
            raise UsageError(f"{str(root)!r} can't be read as a dataset: {one_line(error, 200)}") from error
        self._media = {n: f for n, f in data.features.items() if isinstance(f, datasets.Image | datasets.Audio)}
        for name, feature in self._media.items():
            data = data.cast_column(name, type(feature)(decode=False))
        self._data: Any = data
        files = [Path(file["filename"]) for file in data.cache_files] if isinstance(folder, Path) else folder
        super().__init__(root, files)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Record:
        row = dict(self._data[int(index)])
        for name in self._media:
            if (value := row[name]) is not None and value["bytes"] is None:
                try:
                    value["bytes"] = Path(value["path"]).read_bytes()
                except OSError as error:
                    raise UnusableFileError(f"{value['path']}: {error.strerror}") from error
            row[name] = value and value["bytes"]
        return row

    def column(self, field: str) -> list[Any]:
        return list(self._data[field])

    def class_names(self, field: str) -> tuple[str, ...] | None:
        names = getattr(self._data.features[field], "names", None)
        return tuple(names) if names else super().class_names(field)
