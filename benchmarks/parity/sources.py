"""The data of the families, all from installed packages.

scikit-learn        1,797 handwritten digits of 8×8 pixels (UCI, CC BY 4.0)
scikit-image        photographs of brick, grass and gravel (CC0)
Python              the source of its standard library and its manual's topics (PSF licence 2.0)
vega_datasets       monthly employment by US industry, 2006 to 2015 (Bureau of Labor Statistics, public domain)
vaderSentiment      7,500 words, each rated by ten people (MIT licence)
espeakng-loader     a speech synthesiser (GPL 3; its output is free)
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sysconfig

import numpy as np

Split = tuple[np.ndarray, np.ndarray]


def package_file(package: str, *parts: str) -> pathlib.Path:
    """A file of an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"{package}: the parity suite takes data from it. Install it with pip install mpjax[benchmarks].",
            name=package,
        )
    return pathlib.Path(spec.submodule_search_locations[0]).joinpath(*parts)


@functools.cache
def digits(train: int = 600) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Images [n, 8, 8, 1] with mean 0 and standard deviation 1, and their labels: training and held-out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = ((images - images.mean()) / images.std()).astype(np.float32).reshape(-1, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order].astype(np.int32)
    held_out = slice(train, None)
    return ({"image": images[:train], "label": labels[:train]}, {"image": images[held_out], "label": labels[held_out]})


@functools.cache
def manual() -> tuple[np.ndarray, np.ndarray]:
    """Characters of the Python manual's topics as numbers below 98: 9/10 to train, the rest held out."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    codes = np.where((codes >= 32) & (codes < 127), codes - 31, 0)
    split = len(codes) * 9 // 10
    return codes[:split], codes[split:]


CHARACTERS = 98


def windows(rng: np.random.Generator, codes: np.ndarray, count: int, length: int) -> np.ndarray:
    """Random pieces of a text: [count, length]."""
    starts = rng.integers(len(codes) - length, size=(count, 1))
    return codes[starts + np.arange(length)]


@functools.cache
def standard_library(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Source of the standard library by file name: of the given packages, or of all top-level modules."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    files = [f for p in packages for f in sorted((root / p).glob("*.py"))] if packages else sorted(root.glob("*.py"))
    texts = {str(f.relative_to(root)): f.read_text(errors="replace") for f in files}
    return {name: text for name, text in texts.items() if len(text) > 400}
