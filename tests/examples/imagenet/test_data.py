"""The image training example: its data and its input pipeline."""

from __future__ import annotations

import itertools
import struct
import zlib
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from examples.common.cli import UsageError
from examples.common.loading import Loading
from examples.common.records import read_file
from examples.imagenet import decoding
from examples.imagenet.data import Augmentation, Batch, Dataset, Digits, Mnist, evaluation_batches, train_batches
from examples.imagenet.decoding import Crop, View, middle_box, random_box, read_crop
from examples.imagenet.image_folder import ImageFolder, open_image_folder
from tests.examples.imagenet.image_tree import CLASSES, cat

# Batches.


def opened(root: Path, max_unreadable: float = 0.01) -> tuple[ImageFolder, ImageFolder]:
    return open_image_folder(root, View(16), max_unreadable)


def train_list(dataset: Dataset, batch_size: int = 4, last: int = 9, first: int = 0, **options) -> list[Batch]:
    return [jax.device_get(batch) for batch in train_batches(dataset, batch_size, 3, range(first, last), **options)]


def evaluation_list(dataset: Dataset, batch_size: int, **options) -> list[Batch]:
    return [jax.device_get(batch) for batch in evaluation_batches(dataset, batch_size, **options)]


def assert_equal(one: list[Batch], two: list[Batch]) -> None:
    assert len(one) == len(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_digits_are_split_the_same_way_each_time():
    train, test = Digits("train"), Digits("test")
    assert (len(train), len(test)) == (1437, 360)
    counts = np.bincount(test.load(np.arange(360), None).labels)
    assert counts.min() >= 34
    assert counts.max() <= 37


def test_mnist_comes_from_a_package():
    train, test = Mnist("train"), Mnist("test")
    assert (len(train), len(test)) == (4000, 1000)
    batch = test.load(np.arange(1000), None)
    assert batch.images.shape == (1000, 28, 28, 1)
    assert np.bincount(batch.labels).tolist() == [100] * 10
    scaled = train.load(np.arange(4000), None).images / 255
    # Those of all 60,000; 4,000 of them have a standard error of 1e-4 of the mean.
    assert scaled.mean() == pytest.approx(Mnist.mean[0], rel=0.02)
    assert scaled.std() == pytest.approx(Mnist.std[0], rel=0.02)


def test_shifted_digits_keep_their_pixels():
    data = Digits("train")
    indices = np.arange(32)
    plain, moved = data.load(indices, None).images, data.load(indices, Augmentation(0, 0)).images
    unmoved = [np.array_equal(a, b) for a, b in zip(plain, moved, strict=True)]
    assert 0 < sum(unmoved) < 16
    padded = np.pad(plain, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for image, around in zip(moved, padded, strict=True):
        windows = [around[y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        assert any(np.array_equal(image, window) for window in windows)


def test_training_batches_are_a_function_of_seed_and_step():
    data, steps = Digits("train"), 1437 // 64
    whole = train_list(data, 64, 2 * steps)
    assert len(whole) == 2 * steps
    assert_equal(whole[steps - 3 :], train_list(data, 64, 2 * steps, first=steps - 3))
    order = np.random.default_rng((3, 1)).permutation(1437)
    second = np.concatenate([batch.labels for batch in whole[steps:]])
    np.testing.assert_array_equal(second, data.load(order[: 64 * steps], None).labels)
    with closing(train_batches(data, 64, 4)) as batches:  # another seed, and endless
        assert not np.array_equal(next(batches).labels, whole[0].labels)
        assert len(list(itertools.islice(batches, 2 * steps))) == 2 * steps


@pytest.mark.parametrize("batch_size", [1, 7, 64, 360, 1000])
def test_every_test_image_counts_once(batch_size):
    batches = evaluation_list(Digits("test"), batch_size)
    assert {len(batch.images) for batch in batches} == {batch_size}
    assert sum(batch.mask.sum() for batch in batches) == 360
    labels = np.concatenate([batch.labels[batch.mask > 0] for batch in batches])
    np.testing.assert_array_equal(labels, Digits("test").load(np.arange(360), None).labels)


def test_photos_come_in_the_same_batches_from_any_workers(photos):
    train, _ = opened(photos)
    alone = train_list(train)
    assert alone[0].images.shape == (4, 16, 16, 3)
    assert alone[0].images.dtype == np.uint8
    assert_equal(alone, train_list(train, loading=Loading(5)))
    # Three batches are an epoch: each image occurs once, with other crops in each epoch.
    assert sorted(np.concatenate([batch.labels for batch in alone[:3]])) == [0] * 6 + [1] * 6
    assert not np.array_equal(
        np.sort(np.stack([batch.images for batch in alone[:3]]), axis=None),
        np.sort(np.stack([batch.images for batch in alone[3:6]]), axis=None),
    )


def test_leaving_early_stops_the_workers(photos):
    with closing(train_batches(opened(photos)[0], 4, 0, loading=Loading(2))) as batches:
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


# Pixels, compared with those of Pillow for the whole image.


def plain(path: Path, box: tuple[float, ...], side: int) -> np.ndarray:
    with Image.open(path) as file:
        return np.asarray(file.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, box=box), int)


def distance(pixels: np.ndarray, reference: np.ndarray) -> float:
    return float(np.abs(np.asarray(pixels, int) - reference).mean())


def test_crops_match_those_of_pillow(photos):
    train, test = opened(photos)
    paths = [
        photos / split / path for split, data in (("train", train), ("val", test)) for path, _ in data.records.entries
    ]
    batches = train.load(np.arange(12), Augmentation(3, 1)), test.load(np.arange(6), None)
    flips = 0
    for path, index, pixels in zip(
        paths, [*range(12), *range(6)], np.concatenate([b.images for b in batches]), strict=True
    ):
        rng = np.random.default_rng((3, 1, index))
        box = random_box((120, 100), rng) if "train" in path.parts else middle_box((120, 100))
        reference = plain(path, box, 16)
        if "train" in path.parts and rng.random() < 0.5:
            flips, reference = flips + 1, reference[:, ::-1]
        assert distance(pixels, reference) < 1.5
    assert 0 < flips < 12
    assert batches[1].labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.classes == CLASSES


def test_crop_and_filter_of_tests_can_be_chosen(photos):
    (test,) = open_image_folder(photos, View(16, False, 1.0, "lanczos"), 0.0, ["val"])
    with Image.open(photos / "val" / test.records.entries[0][0]) as file:
        box = {"size": (16, 16), "box": (10, 0, 110, 100)}
        filters = (Image.Resampling.LANCZOS, Image.Resampling.BICUBIC, Image.Resampling.BILINEAR)
        wanted = [np.asarray(file.convert("RGB").resize(resample=kind, **box), int) for kind in filters]
    pixels = test.load(np.arange(1), None).images[0]
    assert distance(pixels, wanted[0]) < min(2.0, *(distance(pixels, other) for other in wanted[1:]))
    train, _ = open_image_folder(photos, View(16, whole=True), 0.0)
    pixels = train.load(np.arange(1), Augmentation(0, 0)).images[0]
    whole_image = plain(photos / "train" / train.records.entries[0][0], (0, 0, 120, 100), 16)
    assert min(distance(pixels, whole_image), distance(pixels[:, ::-1], whole_image)) < 1.5


def test_large_jpegs_are_decoded_at_reduced_size(tmp_path):
    path = tmp_path / "cat.jpg"
    cat().resize((1804, 1200)).save(path, quality=90)
    crop = Crop((100, 40, 1300, 1140), (64, 64))
    with Image.open(path) as file:
        decoding._decode_smaller(file, file.size, crop, 1)
        assert file.size == (226, 150)
    assert distance(decoding.read_crop(read_file(path), lambda full: crop), plain(path, crop.box, 64)) < 1.5


def whole(path: Path) -> np.ndarray:
    return decoding.read_crop(read_file(path), lambda full: Crop((0, 0, *full), full))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "YCbCr"])
def test_images_of_every_mode_become_rgb(mode, tmp_path):
    grey = np.asarray(cat().convert("L").resize((48, 32)))
    image = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    path = tmp_path / ("image.jpg" if mode in ("CMYK", "YCbCr") else "image.png")
    image.save(path, quality=95)
    rgb = whole(path)
    assert rgb.shape == (32, 48, 3)
    wanted = np.asarray(image, int) * 255 if mode == "1" else grey.astype(int)
    assert distance(rgb, wanted[..., None]) < 3


def test_transparent_pixels_become_white(tmp_path):
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    palette = cat().convert("P")
    palette.info["transparency"] = bytes(256)
    for image in (clear, palette):
        image.save(tmp_path / "clear.png")
        assert whole(tmp_path / "clear.png").min() == 255


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation, tmp_path):
    upright, path = cat().resize((96, 64)), tmp_path / "rotated.jpg"
    exif = Image.Exif()
    exif[0x0112] = orientation
    # The image as the sensor saw it. Applying the EXIF orientation restores it.
    names = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_90", "TRANSVERSE", "ROTATE_270"]
    seen = upright if orientation == 1 else upright.transpose(Image.Transpose[names[orientation - 2]])
    seen.save(path, exif=exif, quality=95, subsampling=0)
    assert distance(whole(path), np.asarray(upright, int)) < 4
    box = (5, 3, 69, 51)
    part = decoding.read_crop(read_file(path), lambda full: Crop(box, (8, 6)))
    assert distance(part, np.asarray(upright.resize((8, 6), Image.Resampling.BILINEAR, box=box), int)) < 4


# Invalid files and trees.


def bomb() -> bytes:
    """A PNG whose header claims 60,000 by 60,000 pixels."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)), (b"IDAT", b""))
    parts = (struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def add_unreadable(folder: Path) -> dict[str, str]:
    """Writes unreadable files into a folder; returns their names with a part of the expected reason."""
    photo = sorted(folder.glob("0.*"))[0].read_bytes()
    (folder / "cut.jpg").write_bytes(photo[: len(photo) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.jpeg").write_text("no image")
    (folder / "huge.png").write_bytes(bomb())
    (folder / "gone.jpg").symlink_to(folder / "nowhere.jpg")
    (folder / "loop.jpg").symlink_to(folder / "loop.jpg")
    return {
        "cut.jpg": "truncated",
        "empty.png": "not a complete JPEG",
        "text.jpeg": "not a complete JPEG",
        "huge.png": "decompression bomb",
        "gone.jpg": "No such file",
        "loop.jpg": "symbolic links",
    }


def test_unreadable_files_are_named_and_not_counted(own_photos, capsys):
    reasons = add_unreadable(own_photos / "val" / "china")
    add_unreadable(own_photos / "train" / "china")
    train, test = opened(own_photos, 0.9)
    batches = evaluation_list(test, 5)
    assert sum(batch.mask.sum() for batch in batches) == 6
    lines = [line for line in capsys.readouterr().err.splitlines() if "/val/" in line and line.startswith("skipped")]
    assert len(lines) == len(test.skipped) == len(reasons)
    for name, reason in reasons.items():
        assert sum(f"skipped: {own_photos}/val/china/{name} (" in line for line in lines) == 1
        assert any(name in line and reason in line for line in lines)
    # In training, the next image replaces it: the batch is full, and the same each time.
    batches = train_list(train, 6, 6)
    assert all(batch.mask.all() for batch in batches)
    assert all(batch.images.reshape(6, -1).any(axis=1).all() for batch in batches)
    assert_equal(batches[2:], train_list(opened(own_photos, 0.9)[0], 6, 6, first=2))


@pytest.mark.parametrize("workers", [3, 1])
def test_too_many_unreadable_files_end_the_run(workers, own_photos):
    add_unreadable(own_photos / "train" / "china")
    with pytest.raises(
        UsageError, match=r"4 of 18 files can't be used, the last one '.*'.*at most 3 .*--max-unreadable 0.2"
    ):
        train_list(opened(own_photos, 0.2)[0], loading=Loading(workers))
    for path in (own_photos / "val").rglob("*.*g"):
        path.write_bytes(b"")
    with pytest.raises(UsageError, match="1 of 6 files can't be used"):
        evaluation_list(opened(own_photos, 0.0)[1], 4)


def test_trees_may_have_subfolders_and_links(own_photos):
    china, far = own_photos / "train" / "china", own_photos / "far"
    (china / "more" / "still").mkdir(parents=True)
    (china / "0.jpg").rename(china / "more" / "still" / "0.jpg")
    china.rename(far)
    china.symlink_to(far)
    train, _ = opened(own_photos)
    assert len(train) == 12
    assert "china/more/still/0.jpg" in dict(train.records.entries)
    assert train.load(np.arange(12), None).mask.all()


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (lambda root: (root / "val").rename(root / "vals"), r"no folder 'val' \(it holds 'train', 'vals'\)"),
        (
            lambda root: (root / "val" / "china" / "up").symlink_to(root / "val"),
            "val/china/up/china' contains itself through a symbolic link",
        ),
        (lambda root: (root / "train" / "gone").symlink_to(root / "nowhere"), "train/gone' is a broken link"),
        (lambda root: (root / "train" / "me").symlink_to(root / "train" / "me"), "train/me' is a broken link"),
        (
            lambda root: (root / "train" / "flower").rename(root / "train" / "Flower"),
            "only in train: 'Flower'; only in",
        ),
        (
            lambda root: [path.rename(f"{path}.tif") for path in (root / "train" / "china").iterdir()],
            "holds '0.jpg.tif'",
        ),
    ],
)
def test_invalid_trees_are_refused(spoiled, message, own_photos):
    spoiled(own_photos)
    with pytest.raises(UsageError, match=message):
        opened(own_photos)


def test_images_have_an_identity_that_their_folder_is_no_part_of(own_photos):
    (own_photos / "train" / "china" / "broken.jpg").touch()
    train, _ = opened(own_photos)
    identity = train.identity
    moved = own_photos.rename(own_photos.with_name("moved"))
    assert opened(moved)[0].identity == identity
    (moved / "train" / "china" / "broken.jpg").rename(moved / "train" / "flower" / "broken.jpg")
    assert opened(moved)[0].identity != identity
    (moved / "train" / "flower" / "broken.jpg").unlink()
    assert opened(moved)[0].identity.startswith("12 images")


@pytest.mark.parametrize("orientation", [0, 9, 300])
def test_an_unknown_orientation_turns_nothing(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    plain, turned = tmp_path / "plain.png", tmp_path / "turned.png"
    cat().save(plain)
    cat().save(turned, exif=exif)
    boxes = []
    choose = lambda full: boxes.append(full) or View(16).crop()(full)
    np.testing.assert_array_equal(read_crop(read_file(plain), choose), read_crop(read_file(turned), choose))
    assert boxes == [(451, 300)] * 2
