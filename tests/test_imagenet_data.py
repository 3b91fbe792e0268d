"""The image training example: its models and its data."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from image_tree import CLASSES, make_photo_tree
from PIL import Image

from examples.imagenet.data import Augmentation, Digits, evaluation_batches, train_batches
from examples.imagenet.image_folder import open_image_folder, to_rgb
from examples.imagenet.models import MODEL_NAMES, create_model

# Models.


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet18", 11.690), ("resnet34", 21.798), ("resnet50", 25.557), ("resnet101", 44.549)]
)
def test_models_have_the_published_number_of_parameters(name, millions):
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), np.float32)
    shapes = jax.eval_shape(create_model(name, 1000).init, jax.random.key(0), images)
    count = sum(x.size for x in jax.tree.leaves(shapes["params"]))
    assert round(count / 1e6, 3) == millions


@pytest.mark.parametrize("size", [8, 32, 33, 64])
@pytest.mark.parametrize("name", MODEL_NAMES[:3])
def test_models_take_images_of_any_size(name, size):
    images = jax.ShapeDtypeStruct((2, size, size, 3), np.float32)
    logits, _ = jax.eval_shape(create_model(name, 7).init_with_output, jax.random.key(0), images)
    assert logits.shape == (2, 7)


# Data.


def test_digits_are_split_the_same_way_each_time():
    train, test = Digits("train"), Digits("test")
    assert (len(train), len(test)) == (1437, 360)
    counts = np.bincount(test.load(np.arange(360), None).batch.labels)
    assert counts.min() >= 34
    assert counts.max() <= 37


def test_training_batches_are_a_function_of_seed_and_epoch():
    data = Digits("train")
    once, again = (list(train_batches(data, 64, Augmentation(3, 5), True)) for _ in range(2))
    assert len(once) == 1437 // 64
    for a, b in zip(once, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    later = list(train_batches(data, 64, Augmentation(3, 5), True, first=20))
    for a, b in zip(once[20:], later, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    other = next(train_batches(data, 64, Augmentation(3, 6), True))
    assert not np.array_equal(other.labels, once[0].labels)


def test_shifted_digits_keep_their_pixels():
    data = Digits("train")
    indices = np.arange(32)
    plain, moved = data.load(indices, None).batch.images, data.load(indices, Augmentation(0, 0)).batch.images
    unmoved = [np.array_equal(a, b) for a, b in zip(plain, moved, strict=True)]
    assert 0 < sum(unmoved) < 16
    padded = np.pad(plain, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for image, around in zip(moved, padded, strict=True):
        windows = [around[y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
        assert any(np.array_equal(image, window) for window in windows)


@pytest.mark.parametrize("batch_size", [1, 7, 64, 360, 1000])
def test_every_test_image_counts_once(batch_size):
    batches = list(evaluation_batches(Digits("test"), batch_size))
    assert len({batch.images.shape for batch in batches}) == 1
    assert sum(batch.mask.sum() for batch in batches) == 360
    labels = np.concatenate([batch.labels[batch.mask > 0] for batch in batches])
    np.testing.assert_array_equal(labels, Digits("test").load(np.arange(360), None).batch.labels)


def test_image_folder_reads_a_tree(tmp_path):
    photos = make_photo_tree(tmp_path)
    train, test = open_image_folder(photos, 16, True, 2, 0.0)
    assert (len(train), len(test), train.classes) == (12, 6, CLASSES)
    once, again = (next(train_batches(train, 4, Augmentation(0, 1), True)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert once.images.shape == (4, 16, 16, 3)
    batch, _ = test.load(np.arange(6), None)
    assert batch.labels.tolist() == [0, 0, 0, 1, 1, 1]
    # The middle of a photograph resized, against Pillow asked for the same thing step by step.
    with Image.open(photos / "val" / "china" / "0.jpg") as file:
        middle = file.crop((16, 6, 104, 94)).resize((16, 16), Image.Resampling.BOX)
    assert np.abs(batch.images[0].astype(int) - np.asarray(middle)).mean() < 8


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "YCbCr"])
def test_images_of_every_mode_become_rgb(mode, tmp_path):
    grey = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)
    image = Image.fromarray(grey.astype(np.uint16) * 257) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    path = tmp_path / ("image.jpg" if mode in ("CMYK", "YCbCr") else "image.png")
    image.save(path)
    with Image.open(path) as file:
        rgb = np.asarray(to_rgb(file)).astype(int)
    assert rgb.shape == (8, 8, 3)
    wanted = (grey > 127) * 255 if mode == "1" else grey
    if mode != "1":  # its dithering is Pillow's own
        assert np.abs(rgb - wanted[..., None]).mean() < 6


def test_transparent_pixels_become_white():
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert np.asarray(to_rgb(clear)).min() == 255
    palette = Image.new("P", (2, 2))
    palette.info["transparency"] = b"\x00" * 256
    assert np.asarray(to_rgb(palette)).min() == 255
