"""A small tree of real photographs for tests of image pipelines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("china", "flower")


def make_photo_tree(root: Path) -> Path:
    """Writes crops of scikit-learn's two photographs below `root`, with several extensions, some in greyscale."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    for name, photo in zip(CLASSES, load_sample_images().images, strict=True):
        for split, extensions in (
            ("train", ("jpg", "jpeg", "png", "PNG", "JPG", "png")),
            ("val", ("jpg", "png", "png")),
        ):
            folder = root / split / name
            folder.mkdir(parents=True)
            for index, extension in enumerate(extensions):
                top, left = rng.integers(0, 300, 2)
                crop = Image.fromarray(photo[top : top + 100, left : left + 120])
                mode = "L" if index == 1 else "RGB"
                crop.convert(mode).save(folder / f"{index}.{extension}")
            (folder / "notes.txt").write_text("not an image")
    return root


def cat() -> Image.Image:
    """scikit-image's photograph of a cat, 451x300."""
    from skimage.data import chelsea

    return Image.fromarray(chelsea())
