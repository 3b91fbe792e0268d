"""Compares JPEG decoding speed with torch's DataLoader: `python -m benchmarks.decoding_speed`.

All loaders read the same files: ImageNet-sized crops of scikit-learn's sample photographs. Each image is randomly
cropped, resized and randomly mirrored. torch's Dataset reproduces torchvision's transforms with Pillow; if torch is not
installed, its rows say so. Each loader is timed after its prefetch buffers have drained; rounds are interleaved.
Other load on the machine reduces images/s, but affects images per CPU second much less.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import multiprocessing
import os
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from examples.imagenet.decoding import random_box
from examples.imagenet.image_folder import ImageFolder, Images, open_image_folder
from examples.imagenet.pipeline import train_batches
from perf.results import save

Row = dict[str, Any]
# Yields batches without end; exiting stops its workers.
Loader = Callable[[], contextlib.AbstractContextManager[Iterator[Any]]]

BATCH_SIZE, SIDE = 64, 224
LANDSCAPE = (500, 375)  # the most common size in ImageNet


def make_tree(root: pathlib.Path, images: int) -> None:
    """Writes crops of two photographs, one class each, as JPEGs of ImageNet's size and quality; one in four upright."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        for split, count in (("train", images // 2), ("val", 1)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                size = LANDSCAPE if number % 4 else LANDSCAPE[::-1]
                image = ImageOps.fit(Image.fromarray(photo), size, bleed=rng.uniform(0, 0.15))
                image.save(folder / f"{number}.jpg", quality=90)


@contextlib.contextmanager
def imagenet_batches(dataset: ImageFolder, workers: int) -> Iterator[Iterator[Any]]:
    with train_batches(dataset, BATCH_SIZE, 0, workers=workers, put=lambda batch: batch) as batches:
        yield batches


class TorchImages:
    """torchvision's ImageFolder with RandomResizedCrop, RandomHorizontalFlip, and PILToTensor or ToTensor."""

    def __init__(self, dataset: ImageFolder, normalise: bool) -> None:
        assert isinstance(dataset.images, Images)
        self.paths = [dataset.images.item(index)[0] for index in range(len(dataset))]
        self.labels = dataset.images.labels.tolist()
        self.normalise, self.mean, self.std = normalise, dataset.mean, dataset.std

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        box = random_box(image.size, np.random.default_rng(random.getrandbits(64)))
        left, top, right, bottom = (round(x) for x in box)
        image = image.crop((left, top, right, bottom)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        if self.normalise:
            mean, std = (torch.tensor(x)[:, None, None] for x in (self.mean, self.std))
            pixels = pixels.to(torch.float32).div(255).sub_(mean).div_(std)
        return pixels, self.labels[index]


@contextlib.contextmanager
def torch_batches(dataset: ImageFolder, workers: int, normalise: bool) -> Iterator[Iterator[Any]]:
    import torch

    images = TorchImages(dataset, normalise)
    sampler = torch.utils.data.RandomSampler(images, replacement=True, num_samples=10**6)  # endless epoch
    loader = torch.utils.data.DataLoader(
        images, BATCH_SIZE, sampler=sampler, num_workers=workers, multiprocessing_context="spawn"
    )
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        del iterator, loader  # stops the workers


def seconds_per_image(loader: Loader, workers: int, batches: int) -> tuple[float, float]:
    """Seconds and CPU seconds per image."""
    with loader() as stream:
        for _ in itertools.islice(stream, 2 * workers + 3):
            pass  # fills the prefetch buffers, then drains them
        started, used = time.perf_counter(), cpu_seconds()
        for _ in itertools.islice(stream, batches):
            pass
        images = batches * BATCH_SIZE
        return (time.perf_counter() - started) / images, (cpu_seconds() - used) / images


def cpu_seconds() -> float:
    """CPU seconds of this process and its current workers."""
    total = sum(os.times()[:2])
    for child in multiprocessing.active_children():
        fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(int(ticks) for ticks in fields[11:13]) / os.sysconf("SC_CLK_TCK")
    return total


def loaders(root: pathlib.Path, cores: int) -> dict[str, tuple[int, Loader]]:
    """The worker count and loader of each name."""
    files = open_image_folder(root, SIDE, True, 0.0)[0]
    found: dict[str, tuple[int, Loader]] = {}
    for count in sorted({1, cores}):
        found[f"examples.imagenet, {count} x thread"] = (count, functools.partial(imagenet_batches, files, count))
        for normalise, what in ((False, "uint8"), (True, "normalised float32")):
            name = f"torch DataLoader, {count} x process, {what}"
            found[name] = (count, functools.partial(torch_batches, files, count, normalise))
    return found


def compare(root: pathlib.Path, cores: int, rounds: int, batches: int) -> dict[str, Row]:
    """The median speeds of every loader over the rounds, and the lowest and highest images/s."""
    found = loaders(root, cores)
    have_torch = importlib.util.find_spec("torch") is not None
    rows: dict[str, Row] = {name: {"error": "torch is not installed"} for name in found if "torch" in name}
    names = [name for name in found if have_torch or "torch" not in name]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds):
        names = names[1:] + names[:1] if number % 2 else names[::-1]
        for name in names:
            workers, loader = found[name]
            times[name].append(seconds_per_image(loader, workers, batches))
    for name, values in times.items():
        speeds = [1 / seconds for seconds, _ in values]
        rows[name] = {
            "images_per_second": round(statistics.median(speeds), 1),
            "range": [round(min(speeds), 1), round(max(speeds), 1)],
            "images_per_cpu_second": round(1 / statistics.median(used for _, used in values), 1),
        }
    return {name: rows[name] for name in found}


def table(rows: dict[str, Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| loader | images/s | lowest to highest | images per CPU second |", "|---|---|---|---|"]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | |")
        else:
            low, high = row["range"]
            lines.append(
                f"| {name} | {row['images_per_second']:,.0f} | {low:,.0f} to {high:,.0f} "
                f"| {row['images_per_cpu_second']:,.0f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512, help="number of JPEGs to generate")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="number of workers of the larger runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=8, help=f"batches of {BATCH_SIZE} images timed per round")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results", help="folder for the results"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        make_tree(root, options.images)
        sizes = [path.stat().st_size for path in (root / "train").rglob("*.jpg")]
        rows = compare(root, options.cores, options.rounds, options.batches)
    files = {
        "images": len(sizes),
        "size": list(LANDSCAPE),
        "kilobytes": round(statistics.mean(sizes) / 1e3, 1),
        "resized_to": SIDE,
        "batch_size": BATCH_SIZE,
    }
    print(table(rows))
    print(save("decoding_speed", {"files": files, "loaders": rows}, options.out))


if __name__ == "__main__":
    main()
