"""Random access to the entries of shards: TFRecord, ArrayRecord, WebDataset tars, and Hugging Face datasets on disk.

The seed and the step number determine a batch, so entries must be readable in any order. ArrayRecord (read by Grain)
and Arrow files (read by `datasets`) allow that. Readers of the other two (Grain's TFRecordIterDataset, the webdataset
package) read a file from its beginning, so this module builds an index of offsets when it opens the data.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import itertools
import json
import os
import re
import struct
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from examples.common.cli import UnusableFileError, UsageError, listing, one_line, optional

Record = dict[str, Any]

# Number of entries that a fingerprint reads: enough to notice another version of the data, few enough to be fast.
_SAMPLE = 64


class Records(abc.ABC):
    """The entries of one split, each a dictionary of values by field.

    Attributes:
        root: Folder or file of the dataset.
        paths: The files with the entries.
        entries: The entries, or what they are read from.
    """

    entries: Any

    def __init__(self, root: Path, paths: Sequence[Path]) -> None:
        self.root, self.paths = root, tuple(paths)

    def __len__(self) -> int:
        return len(self.entries)

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
                names = tuple(line.strip() for line in path.read_text(encoding="utf-8").rstrip().splitlines())
                if repeated := [line for line, count in Counter(names).items() if count > 1 or not line]:
                    raise UsageError(f"{str(path)!r}: {listing(repeated)} is empty or repeated; name each class.")
                return names
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
            lacking = f"none of {', '.join(candidates)} for the {what}; name it with --{what}-field."
            raise UsageError(f"{str(self.root)!r}: entries have the fields {listing([*found], 10)}, and {lacking}")
        raise UsageError(f"{str(self.root)!r} has no entry that can be read.")

    def digest(self) -> str:
        """A hash that changes if shards are added, removed or resized, or if a sampled entry changes."""

        names = [f"{path.name}\t{path.stat().st_size}" for path in self.paths]
        return fingerprint([*names, str(len(self))], len(self), lambda i: repr(sorted(self[i].items())).encode())


def fingerprint(names: Sequence[str], count: int, read: Callable[[int], bytes]) -> str:
    """A hash that changes if a name or the content of a sampled entry changes.

    Args:
        names: Names with labels or sizes, which identify the data independently of its folder.
        count: Number of entries.
        read: Returns the content of an entry by number. An entry that can't be read counts as empty.
    """
    digest = hashlib.sha256("\n".join(names).encode("utf-8", "surrogateescape"))
    for index in range(0, count, max(1, count // _SAMPLE)):
        try:
            content = read(index)
        except (OSError, UnusableFileError):
            content = b""
        digest.update(f"{len(content)} {hashlib.sha256(content).hexdigest()}".encode())
    return digest.hexdigest()


def read_file(path: Path) -> bytes:
    """The content of a file. Raises an `UnusableFileError` if it can't be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableFileError(f"{error.strerror}") from error


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
    """Serialised `tf.train.Example`s, as TensorFlow Datasets and NVIDIA's scripts write them.

    Args:
        root: Folder or file of the dataset.
        paths: The files.
        source: A sequence of bytes; by default the records of TFRecord files.
    """

    def __init__(self, root: Path, paths: Sequence[Path], source: Any = None) -> None:
        super().__init__(root, paths)
        self.entries = TFRecordFiles(paths) if source is None else source

    def __getitem__(self, index: int) -> Record:
        from google.protobuf.message import DecodeError

        try:
            features = example_type().FromString(self.entries[index]).features.feature
        except (DecodeError, OSError, RuntimeError, ValueError) as error:
            raise UnusableFileError(f"not a tf.train.Example: {one_line(error, 100)}") from error
        return {name: _feature_value(feature) for name, feature in features.items()}


def _feature_value(feature: Any) -> Any:
    values = [value for _, part in feature.ListFields() for value in part.value]
    return values[0] if len(values) == 1 else values or None


@functools.cache
def example_type() -> Any:
    """Builds the class of `tf.train.Example`, which `example.textproto` describes, without TensorFlow."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    description = Path(__file__).with_name("example.textproto").read_text("utf-8")
    pool.Add(text_format.Parse(description, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("mpjax_examples.Example"))


class TFRecordFiles(list[Any]):
    """Random access to the records of uncompressed TFRecord files.

    A record is its length (8 bytes), a checksum of the length (4), the content, and a checksum of the content (4). As
    in Grain, checksums aren't verified. Wrong lengths show at the end of the file, wrong content in the decoder.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__(itertools.chain.from_iterable(map(_tfrecord_parts, paths)))

    def __getitem__(self, index: Any) -> Any:
        return _read_part(*super().__getitem__(index))


def _read_part(path: Path, offset: int, size: int) -> bytes:
    # Opening the file for each part takes microseconds, is thread-safe, and keeps records picklable.
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(size)


def _tfrecord_parts(path: Path) -> Iterator[tuple[Path, int, int]]:
    """Offset and size of the content of each record."""
    size, at = path.stat().st_size, 0
    with path.open("rb", buffering=0) as file:
        while at < size:
            file.seek(at)
            header = file.read(8)
            length = struct.unpack("<Q", header)[0] if len(header) == 8 else size
            if at + length + 16 > size:
                why = f"the record at byte {at} extends beyond its end at {size}. Unpack it, or copy it again."
                raise UsageError(f"{str(path)!r} is not a complete, uncompressed TFRecord file: {why}")
            yield path, at + 12, length
            at += length + 16


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
        self.entries: list[tuple[str, Path, dict[str, tuple[int, int]]]] = []  # name, shard, field: offset and size
        for path in paths:
            try:
                self._index(path)
            except (tarfile.TarError, OSError) as error:
                why = f"{one_line(error)}. Unpack it, or copy it again."
                raise UsageError(f"{str(path)!r} is not a complete, uncompressed tar file: {why}") from error

    def _index(self, path: Path) -> None:
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
                if not self.entries or self.entries[-1][:2] != (name, path):
                    self.entries.append((name, path, {}))
                places = self.entries[-1][2]
                if (field := sys.intern(field.lower())) in places:
                    lost = "files of one name are one entry, so all but the last would be lost. Name each differently."
                    raise UsageError(f"{str(path)!r} holds {member.name!r} twice: {lost}")
                places[field] = member.offset_data, member.size

    def name(self, index: int) -> str:
        name, shard, _ = self.entries[index]
        return f"{shard.name}/{name}"

    def _value(self, index: int, field: str) -> Any:
        return self.__getitem__(index, (field, "json")).get(field)  # Skip other fields, such as the image.

    def __getitem__(self, index: int, only: Sequence[str] | None = None) -> Record:
        _, shard, places = self.entries[index]
        fields = places if only is None else places.keys() & only
        record: Record = {field: _read_part(shard, *places[field]) for field in fields}
        if "json" in record:
            try:
                record = {**json.loads(record["json"]), **record}
            except (ValueError, TypeError) as error:
                raise UnusableFileError(f"its json is invalid: {one_line(error, 100)}") from error
        return record


class HuggingFace(Records):
    """A dataset that `datasets.Dataset.save_to_disk` wrote, or Parquet files of the hub. Media stay encoded."""

    def __init__(self, root: Path, folder: Path | Sequence[Path]) -> None:
        datasets = optional("datasets", f'{str(root)!r} needs the package datasets: pip install "mpjax[huggingface]".')
        try:
            if isinstance(folder, Path):
                data: Any = datasets.load_from_disk(str(folder))
            else:
                size = sum(path.stat().st_size for path in folder) / 2**20
                cache = datasets.config.HF_DATASETS_CACHE
                print(f"{root}: {size:,.0f} MiB of Parquet are unpacked once to {cache}", file=sys.stderr)
                data = datasets.Dataset.from_parquet([str(path) for path in folder])
        except Exception as error:
            raise UsageError(f"{str(root)!r} can't be read as a dataset: {one_line(error, 200)}") from error
        self._media = {n: f for n, f in data.features.items() if isinstance(f, datasets.Image | datasets.Audio)}
        for name, feature in self._media.items():
            data = data.cast_column(name, type(feature)(decode=False))
        self.entries = data
        files = [Path(file["filename"]) for file in data.cache_files] if isinstance(folder, Path) else folder
        super().__init__(root, files)

    def __getitem__(self, index: int) -> Record:
        row = dict(self.entries[int(index)])
        for name in self._media:
            value = row[name]
            row[name] = value and (value["bytes"] if value["bytes"] is not None else read_file(Path(value["path"])))
        return row

    def column(self, field: str) -> list[Any]:
        return list(self.entries[field])

    def class_names(self, field: str) -> tuple[str, ...] | None:
        names = getattr(self.entries.features[field], "names", None)
        return tuple(names) if names else super().class_names(field)


# Detects the format of the shards in a folder and opens those of one split.

# Names of each split. The first one that exists is used.
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev", "eval", "test")}

EXPECTED = (
    "shards whose names contain the word train or val (*.tfrecord, *.array_record, *.tar, *.parquet), or a folder that "
    "the datasets library saved"
)

_COMPRESSED = re.compile(r"(\.tar|record|-of-\d+).*\.(gz|bz2|xz|zst)$|\.tgz$")
_NUMBERED = r"(-\d+-of-\d+)?"
_KINDS: dict[str, tuple[str, Callable[[Path, Sequence[Path]], Records]]] = {
    "ArrayRecord": (rf"\.array_?record{_NUMBERED}$", open_array_records),
    "WebDataset": (r"\.tar$", TarFiles),
    "Parquet": (r"\.parquet$", HuggingFace),
    # ImageNet's shards have no suffix: train-00000-of-01024.
    "TFRecord": (rf"\.tfrecords?{_NUMBERED}$|-\d+-of-\d+$", Examples),
}


def open_records(root: Path, split: str | None = None) -> Records | None:
    """Opens the entries of a split. Returns None if there are no shards.

    Args:
        root: A folder with shards in it or in its subfolders, a single shard, or a folder of the datasets library.
        split: A key of `SPLITS`, which selects shards; None for all shards.

    Raises:
        UsageError: The shards have none of this split, have several formats, or can't be read.
    """
    dictionary, apart = root / "dataset_dict.json", [path.parent.name for path in root.glob("*/state.json")]
    saved = json.loads(dictionary.read_text())["splits"] if dictionary.is_file() else apart
    for word in saved if split is None and len(saved) == 1 else SPLITS.get(split or "", ()):
        if word in saved:
            return HuggingFace(root, root / word)
    if dictionary.is_file():
        asked = f"split {split!r}" if split else "single split"
        raise UsageError(f"{str(root)!r} is a DatasetDict without a {asked}; it holds {listing(saved)}.")
    if (root / "dataset_info.json").is_file() and (root / "state.json").is_file():
        if split not in (None, "train"):
            raise UsageError(f"{str(root)!r} is one dataset without splits; save a DatasetDict with train and test.")
        return HuggingFace(root, root)
    files = [root] if root.is_file() else sorted([*root.glob("*"), *root.glob("*/*")])
    found = {path: kind for path in files if (kind := _kind(path)) and path.is_file()}
    if not found and (packed := [path.name for path in files if _COMPRESSED.search(path.name)]):
        why = f"{listing(packed)} are compressed, so entries can't be read in any order: unpack."
        raise UsageError(f"{str(root)!r}: {why}")
    if not found:
        return None
    chosen = [path for path in found if split is None] or _of_split(root, list(found), split or "")
    kinds = sorted({found[path] for path in chosen})
    if len(kinds) > 1:
        raise UsageError(f"{str(root)!r} holds shards of several formats ({', '.join(kinds)}); keep only one.")
    records = _KINDS[kinds[0]][1](root, chosen)
    if not len(records):
        raise UsageError(f"{str(root)!r}: the {kinds[0]} files {listing([path.name for path in chosen])} are empty.")
    return records


def _kind(path: Path) -> str | None:
    return next((kind for kind, (pattern, _) in _KINDS.items() if re.search(pattern, path.name)), None)


def _of_split(root: Path, paths: Sequence[Path], split: str) -> list[Path]:
    words = {path: re.split(r"[^a-z]+", str(path.relative_to(root)).lower()) for path in paths}
    for word in SPLITS[split]:
        if chosen := [path for path in paths if word in words[path]]:
            _check_one_set(root, chosen)
            return chosen
    there = listing([str(path.relative_to(root)) for path in paths])
    need = f"the name must contain one of the words {', '.join(SPLITS[split])}. The folder holds {there}."
    raise UsageError(f"--data-dir {str(root)!r} has no shard of the split {split!r}: {need}")


def _check_one_set(root: Path, paths: Sequence[Path]) -> None:
    """Refuses `train_small.tfrecord` beside `train.tfrecord`: both would be read."""
    names = {path.relative_to(root).parent / path.name.partition(".")[0] for path in paths}
    stems = sorted({re.sub(r"[-_\d]+(of)?[-_\d]*$", "", str(name)) for name in names})
    for one, other in itertools.combinations(stems, 2):
        if one and other.startswith((f"{one}-", f"{one}_", f"{one}.")):
            sets = f"two sets of shards of one split, {one!r} and {other!r}: move one away."
            raise UsageError(f"--data-dir {str(root)!r} has {sets}")
