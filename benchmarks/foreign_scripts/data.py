"""Tiny data in place of downloads: images of ten classes that a network can learn."""

from __future__ import annotations

import contextlib
import gzip
import pathlib
import shutil
import struct
from collections.abc import Iterator

import numpy as np

# Where JAX's examples look for MNIST before they download it.
JAX_EXAMPLES = pathlib.Path("/tmp/jax_example_data")


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 of shape (count, 28, 28), and labels, uint8 of shape (count,)."""
    templates = np.random.default_rng(0).integers(0, 200, size=(10, 28, 28))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, size=count).astype(np.uint8)
    return (templates[labels] + rng.integers(0, 56, size=(count, 28, 28))).astype(np.uint8), labels


@contextlib.contextmanager
def mnist_of_jax_examples(seed: int) -> Iterator[None]:
    """Data where JAX's examples look for it, unless the real data is there."""
    mark = JAX_EXAMPLES / "generated"
    if JAX_EXAMPLES.exists() and not mark.exists():
        yield
        return
    JAX_EXAMPLES.mkdir(exist_ok=True)
    mark.touch()
    try:
        for name, count in ("train", 512), ("t10k", 128):
            images, labels = digits(count, seed + len(name))
            _write(f"{name}-images-idx3-ubyte.gz", struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
            _write(f"{name}-labels-idx1-ubyte.gz", struct.pack(">II", 2049, count) + labels.tobytes())
        yield
    finally:
        shutil.rmtree(JAX_EXAMPLES)


def _write(name: str, content: bytes) -> None:
    with gzip.open(JAX_EXAMPLES / name, "wb") as file:
        file.write(content)


def corpus(seed: int) -> str:
    """Text of a small grammar."""
    words = ["the cat", "a dog", "sees", "the house", "and", "sleeps", "in", "under", "a tree", "no one"]
    return " ".join(words[i] for i in np.random.default_rng(seed).integers(0, 10, size=4000))
