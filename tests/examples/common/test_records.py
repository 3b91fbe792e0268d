"""Shards of every format return the images and speech that were written."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

from examples.common import records
from examples.common.cli import UsageError
from examples.common.records import example_type
from examples.imagenet import image_folder
from examples.imagenet.config import Config
from examples.imagenet.decoding import View
from examples.imagenet.image_folder import ImageFolder, open_image_folder, open_image_records
from examples.imagenet.train import open_data
from tests.examples.imagenet.image_tree import CLASSES
from tests.examples.speech.runs import open_speech

Rows = Sequence[dict[str, Any]]


def serialised(row: dict[str, Any]) -> bytes:
    example = example_type()()
    for name, value in row.items():
        feature = example.features.feature[name]
        if isinstance(value, int):
            feature.int64_list.value.append(value)
        else:
            feature.bytes_list.value.append(value if isinstance(value, bytes) else value.encode())
    return example.SerializeToString()


def write_tfrecord(path: Path, rows: Rows) -> None:
    with path.open("wb") as file:
        for content in map(serialised, rows):
            file.write(struct.pack("<Q4x", len(content)) + content + bytes(4))


def write_array_record(path: Path, rows: Rows) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(serialised(row))
    writer.close()


def write_tar(path: Path, rows: Rows) -> None:
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows):
            for field, value in row.items():
                content = value if isinstance(value, bytes) else str(value).encode()
                member = tarfile.TarInfo(f"some/{number:04d}.{field}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def halves(rows: Rows) -> tuple[Rows, Rows]:
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def sharded(write: Callable[[Path, Rows], None], name: str) -> Callable[..., None]:
    """Writes two shards per split; `name` is a format string of `split` and `number`."""

    def write_all(root: Path, splits: dict[str, Rows], names: Sequence[str] = ()) -> None:
        for split, rows in splits.items():
            for number, part in enumerate(halves(rows)):
                path = root / name.format(split=split, number=number)
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, part)
        if names:
            (root / "labels.txt").write_text("\n".join(names) + "\n")

    return write_all


def write_hugging_face(root: Path, splits: dict[str, Rows], names: Sequence[str] = ()) -> None:
    datasets = pytest.importorskip("datasets")
    made = {}
    for split, rows in splits.items():
        data = datasets.Dataset.from_list([dict(row) for row in rows])
        for field in data.features:
            if field == "label" and names:
                data = data.cast_column(field, datasets.ClassLabel(names=list(names)))
            elif field in ("image", "audio"):
                kind = datasets.Image if field == "image" else datasets.Audio
                media = [{"bytes": row[field], "path": None} for row in rows]
                data = data.remove_columns(field).add_column(field, media).cast_column(field, kind(decode=False))
        made["validation" if split == "val" else split] = data
    datasets.DatasetDict(made).save_to_disk(str(root))


FORMATS = {
    "tfrecord": (sharded(write_tfrecord, "photos-{split}.tfrecord-0000{number}-of-00002"), "image", "label"),
    "nvidia": (sharded(write_tfrecord, "{split}-0000{number}-of-00002"), "image/encoded", "image/class/label"),
    "array_record": (
        sharded(write_array_record, "photos-{split}.array_record-0000{number}-of-00002"),
        "image",
        "label",
    ),
    "webdataset": (sharded(write_tar, "{split}/photos-{number:04d}.tar"), "jpg", "cls"),
    "hugging_face": (write_hugging_face, "image", "label"),
}


def opened(root: Path, **options: Any) -> list[ImageFolder]:
    return open_image_folder(root, View(16), 0.0, **options)


def rows_of(folder: ImageFolder, image: str, label: str) -> Rows:
    items = [folder.item(index) for index in range(len(folder))]
    return [{image: file, label: value} for file, value in items]


@pytest.mark.parametrize("kind", FORMATS)
def test_images_in_shards_equal_those_in_folders(kind, photos, tmp_path):
    write, image, label = FORMATS[kind]
    expected = opened(photos)
    splits = {split: rows_of(folder, image, label) for split, folder in zip(("train", "val"), expected, strict=True)}
    write(tmp_path / "data", splits, CLASSES)
    found = opened(tmp_path / "data")
    for one, two in zip(found, expected, strict=True):
        assert tuple(one.classes) == CLASSES
        batches = [data.load(np.arange(len(two)), None) for data in (one, two)]
        jax.tree.map(np.testing.assert_array_equal, *batches)
    assert found[0].name_of(1)[1] == "china"
    # A run resumes with the same entries at any path, but not with other entries.
    identity = found[0].identity
    moved = opened((tmp_path / "data").rename(tmp_path / "moved"))
    assert moved[0].identity == identity
    splits["train"][0][image] = splits["train"][1][image]
    write(tmp_path / "other", splits, CLASSES)
    assert opened(tmp_path / "other")[0].identity != identity


@pytest.mark.parametrize("kind", ["tfrecord", "array_record", "webdataset", "hugging_face"])
def test_labels_without_names_are_classes_of_their_own(kind, photos, tmp_path):
    write, image, label = FORMATS[kind]
    folder = opened(photos)[0]
    rows = [row | {label: 7 + 5 * row[label]} for row in rows_of(folder, image, label)]
    write(tmp_path / "data", {"train": rows, "val": rows[:8]})
    train = opened(tmp_path / "data")[0]
    assert tuple(train.classes) == ("7", "12")
    np.testing.assert_array_equal(train.load(np.arange(12), None).labels, [0] * 6 + [1] * 6)


def test_captions_as_classes_are_warned_of(photos, tmp_path, capsys):
    rows = rows_of(opened(photos)[0], "jpg", "txt")
    rows = [row | {"txt": f"caption {number}"} for number, row in enumerate(rows)]
    FORMATS["webdataset"][0](tmp_path, {"train": rows, "val": rows})
    open_data(Config(data_dir=tmp_path, image_size=16))
    assert "12 classes for 12 images: are the labels captions? --label-field" in capsys.readouterr().err


def test_test_set_without_some_classes_uses_those_of_the_model(photos, tmp_path):
    rows = rows_of(opened(photos)[1], "jpg", "cls")
    names = [row | {"cls": CLASSES[row["cls"]]} for row in rows]
    FORMATS["webdataset"][0](tmp_path, {"val": [row for row in names if row["cls"] == "flower"]})
    (test,) = opened(tmp_path, splits=["val"], classes=CLASSES)
    np.testing.assert_array_equal(test.load(np.arange(len(test)), None).labels, 1)


def test_labels_in_json_and_damaged_entries(photos, tmp_path):
    rows = [
        {"jpg": row["jpg"], "json": json.dumps({"label": row["label"]})}
        for row in rows_of(opened(photos)[1], "jpg", "label")
    ]
    rows[1] = rows[1] | {"json": "{"}
    rows[2] = rows[2] | {"jpg": b"no image"}
    FORMATS["webdataset"][0](tmp_path, {"train": rows, "val": rows})
    train, _ = open_image_folder(tmp_path, View(16), 0.5)
    loaded = train.load(np.arange(6), None)
    np.testing.assert_array_equal(loaded.mask, [1, 0, 0, 1, 1, 1])
    assert {name.rpartition("/")[2]: reason.split(":")[0] for name, reason in train.skipped.reasons.items()} == {
        "0001": "its json is invalid",
        "0002": "not a complete JPEG, PNG, WEBP, GIF or BMP",
    }


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def overwritten(path: str) -> Callable[[Path], Any]:
    return lambda root: (root / path).write_bytes(b"x" * 70_000)


REFUSED = [
    (
        "tfrecord",
        lambda r: cut_short(r / "photos-train.tfrecord-00001-of-00002"),
        "not a complete, uncompressed TFRecord",
    ),
    ("webdataset", overwritten("train/photos-0001.tar"), "not a complete, uncompressed tar"),
    ("array_record", overwritten("photos-train.array_record-00000-of-00002"), "ArrayRecord files can't be read"),
    ("webdataset", lambda r: (r / "val").rename(r / "rest"), "no shard of the split 'val'.* 'rest/photos-0000.tar'"),
    ("webdataset", lambda r: (r / "train/photos.tfrecord").touch(), "several formats .TFRecord, WebDataset."),
    (
        "hugging_face",
        lambda r: (r / "dataset_dict.json").write_text('{"splits": ["train", "more"]}'),
        "without a split 'val'; it holds 'train', 'more'",
    ),
    (
        "webdataset",
        lambda r: write_tar(r / "train/photos-0000.tar", [{"tiff": b"1", "cls": 1}]),
        "have the fields 'tiff', 'cls', and none of image/encoded",
    ),
]


@pytest.mark.parametrize(("kind", "corrupt", "message"), REFUSED)
def test_invalid_shards_are_refused(kind, corrupt, message, photos, tmp_path):
    write, image, label = FORMATS[kind]
    rows = rows_of(opened(photos)[1], image, label)
    write(tmp_path / "data", {"train": rows, "val": rows}, CLASSES)
    corrupt(tmp_path / "data")
    with pytest.raises(UsageError, match=message):
        opened(tmp_path / "data")


def test_folder_without_known_files_is_listed(tmp_path):
    (tmp_path / "train.zip").touch()
    with pytest.raises(UsageError, match=r"it holds 'train.zip'.*\*\.tfrecord, \*\.array_record, \*\.tar"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", ["tfrecord", "array_record", "webdataset", "hugging_face"])
def test_speech_in_shards_equals_what_was_written(kind, tmp_path):
    write = FORMATS[kind][0]
    field, text = ("wav", "txt") if kind == "webdataset" else ("audio", "text")
    samples = [np.linspace(-0.5, 0.5, 4000 + 100 * number, dtype=np.float32) for number in range(4)]
    rows = []
    for number, wave in enumerate(samples):
        content = io.BytesIO()
        soundfile.write(content, wave, 16_000, format="WAV", subtype="FLOAT")
        rows.append({field: content.getvalue(), text: f"number {'abcd'[number]} "})
    rows.append(rows[0] | {field: b"no audio"})
    write(tmp_path / "data", {"train": rows})
    speech = open_speech(tmp_path / "data", max_skipped=0.5)
    assert speech.transcripts == ["number a", "number b", "number c", "number d"]
    for index, wave in enumerate(samples):
        np.testing.assert_array_equal(speech.load(index), wave)
    assert [reason.split(":")[0] for reason in speech.skipped.reasons.values()] == ["not readable as audio"]
    identity = speech.identity
    assert open_speech((tmp_path / "data").rename(tmp_path / "moved"), max_skipped=0.5).identity == identity


def test_a_tar_that_repeats_a_name_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as tar:
        for content in (b"one", b"other"):
            member = tarfile.TarInfo("image.jpg")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    with pytest.raises(UsageError, match=r"holds 'image\.jpg' twice"):
        open_image_records(tmp_path, ["train"])


@pytest.mark.parametrize("labels", [[1, 2], [0, 2], [-1, 0]])
def test_a_label_without_a_name_is_an_error(labels, tmp_path):
    write, image, label = FORMATS["array_record"]
    write(tmp_path, {"train": [{image: b"", label: value} for value in labels] * 2}, ["cat", "dog"])
    (train,) = open_image_folder(tmp_path, View(16), 0.0, ["train"])
    with pytest.raises(UsageError, match=r"is out of range: there are 2 class names, 0 to 1\. If labels"):
        [train.item(index) for index in range(len(train))]


def test_several_labels_for_an_image_are_an_error():
    assert image_folder._class_name(np.array([1]), ["cat", "dog"]) == "dog"
    with pytest.raises(UsageError, match=r"the label \[0, 1\] is a list"):
        image_folder._class_name([0, 1], None)


def test_two_sets_of_shards_of_a_split_are_an_error(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002", "val-00000-of-00001"):
        (tmp_path / f"photos-{name}.tfrecord").write_bytes(b"")
    paths = sorted(tmp_path.iterdir())
    assert len(records._of_split(tmp_path, paths, "train")) == 2
    more = tmp_path / "photos-train_small.tfrecord"
    with pytest.raises(UsageError, match=r"two sets of shards of one split, 'photos-train' and 'photos-train_small'"):
        records._of_split(tmp_path, [*paths, more], "train")
