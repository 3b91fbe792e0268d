"""Detects the format of the shards in a folder and opens those of one split."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from examples.common.cli import UsageError, listing
from examples.common.records import Examples, HuggingFace, Records, TarFiles, TFRecordFiles, open_array_records

# Names of each split. The first one that exists is used.
SPLITS = {"train": ("train", "training"), "val": ("val", "valid", "validation", "dev", "eval", "test")}

EXPECTED = (
    "shards whose names contain the word train or val (*.tfrecord, *.array_record, *.tar, *.parquet), or a folder that "
    "the datasets library saved"
)

_Open = Callable[[Path, Sequence[Path]], Records]
_COMPRESSED = re.compile(r"(\.tar|record|-of-\d+).*\.(gz|bz2|xz|zst)$|\.tgz$")
_NUMBERED = r"(-\d+-of-\d+)?"
_KINDS: dict[str, tuple[str, _Open]] = {
    "ArrayRecord": (rf"\.array_?record{_NUMBERED}$", open_array_records),
    "WebDataset": (r"\.tar$", TarFiles),
    "Parquet": (r"\.parquet$", HuggingFace),
    # ImageNet's shards have no suffix: train-00000-of-01024.
    "TFRecord": (
        rf"\.tfrecords?{_NUMBERED}$|-\d+-of-\d+$",
        lambda root, paths: Examples(root, paths, TFRecordFiles(paths)),
    ),
}


def open_records(root: Path, split: str | None = None) -> Records | None:
    """Opens the entries of a split. Returns None if there are no shards.

    Args:
        root: A folder with shards in it or in its subfolders, a single shard, or a folder of the datasets library.
        split: A key of `SPLITS`, which selects shards; None for all shards.

    Raises:
        UsageError: The shards have none of this split, have several formats, or can't be read.
    """
    if (root / "dataset_dict.json").is_file():
        return _open_dictionary(root, split)
    if (root / "dataset_info.json").is_file() and (root / "state.json").is_file():
        if split not in (None, "train"):
            raise UsageError(f"{str(root)!r} is one dataset without splits; save a DatasetDict with train and test.")
        return HuggingFace(root, root)
    for word in SPLITS.get(split or "", ()):
        if (root / word / "state.json").is_file():
            return HuggingFace(root, root / word)
    files = [root] if root.is_file() else sorted([*root.glob("*"), *root.glob("*/*")])
    found = {path: kind for path in files if (kind := _kind(path)) and path.is_file()}
    if not found and (packed := [path.name for path in files if _COMPRESSED.search(path.name)]):
        raise UsageError(
            f"{str(root)!r}: {listing(packed)} are compressed, so entries can't be read in any order: unpack."
        )
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
    raise UsageError(
        f"--data-dir {str(root)!r} has no shard of the split {split!r}: the name must contain one of the words "
        f"{', '.join(SPLITS[split])}. The folder holds {listing([str(path.relative_to(root)) for path in paths])}."
    )


def _check_one_set(root: Path, paths: Sequence[Path]) -> None:
    """Refuses `train_small.tfrecord` beside `train.tfrecord`: both would be read."""
    names = {path.relative_to(root).parent / path.name.partition(".")[0] for path in paths}
    stems = sorted({re.sub(r"[-_\d]+(of)?[-_\d]*$", "", str(name)) for name in names})
    for one, other in itertools.combinations(stems, 2):
        if one and other.startswith((f"{one}-", f"{one}_", f"{one}.")):
            raise UsageError(
                f"--data-dir {str(root)!r} has two sets of shards of one split, {one!r} and {other!r}: move one away."
            )


def _open_dictionary(root: Path, split: str | None) -> Records:
    there = json.loads((root / "dataset_dict.json").read_text())["splits"]
    wanted = there[:1] if split is None and len(there) == 1 else SPLITS.get(split or "", ())
    name = next((word for word in wanted if word in there), None)
    if name is None:
        asked = f"split {split!r}" if split else "single split"
        raise UsageError(f"{str(root)!r} is a DatasetDict without a {asked}; it holds {listing(there)}.")
    return HuggingFace(root, root / name)
