"""What the image script shares with every script: its names, its data, and the facts for its output files."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from examples.common.cli import SkippedFiles, UsageError, each_readable, listing, say
from examples.common.modes import cast_to_policy
from examples.common.pictures import draw_confusion
from examples.common.records import read_file
from examples.common.run_folder import write_json
from examples.common.task import Task
from examples.common.training import DataParallel, Variables, check_outputs
from examples.imagenet import data
from examples.imagenet.config import Config
from examples.imagenet.data import Array, Batch, Dataset, Description
from examples.imagenet.decoding import View, read_crop
from examples.imagenet.image_folder import open_image_folder
from examples.imagenet.models import KINDS, read_pretrained


class ImageData(Task):
    """The images of a task and how they are loaded; `examples.imagenet.train` adds the model."""

    config_type, unit = Config, "images"
    predict_step: Any  # jitted (variables, images) -> probabilities
    metric, metric_name, table = ("test_accuracy", 1), "test accuracy", {"test_accuracy": "test accuracy"}

    def __init__(self, config: Config, parallel: DataParallel, data: Data) -> None:
        super().__init__(config, parallel, data)
        self.about = data.about
        self.train_set: Any = data.train
        self.test_set: Any = data.test
        known: Any = data.train or data.test
        if data.train is not None:
            self.check_batch_size(data.train.name, len(data.train))
            self.steps = len(data.train) // self.batch_size
        if data.test is not None:
            # A test set smaller than a batch is not padded to a full batch.
            self.test_count = len(data.test)
            self.test_batch_size = parallel.filled(min(self.batch_size, self.test_count))
        self.title = f"{config.model_name} on {known.name if known else 'images'}, policy {config.policy}"
        self._stream: Any = None

    @classmethod
    def open(cls, config: Config, description: dict[str, Any] | None = None) -> Data:
        return open_data(config, None if description is None else Description.from_json(description))

    def facts(self) -> dict[str, Any]:
        sizes = {f"{name}_images": len(images) for name, images in self._sets().items()}
        unreadable = sum(map(len, self.skipped().values()))
        return {"model": self.config.model_name, **sizes, "unreadable_images": unreadable}

    def _sets(self) -> dict[str, Dataset]:
        sets = {"train": self.train_set, "test": self.test_set}
        return {name: images for name, images in sets.items() if images is not None}

    def skipped(self) -> dict[str, SkippedFiles]:
        return {name: images.problems for name, images in self._sets().items() if images.problems is not None}

    def description(self) -> dict[str, Any]:
        return self.about._asdict()

    def identity(self) -> dict[str, Any]:
        return {f"{name} images": x.identity for name, x in self._sets().items()} | {"classes": self.about.classes}

    def predict(self, variables: Variables) -> dict[str, Any]:
        """Writes the predicted classes of `--images`, or else of all test images, to predictions.json."""
        config, classes = self.config, self.about.classes
        readable, unreadable = each_readable(config.images, self._read, "--images")
        images: Dataset = data.Files(self.about, readable) if config.images else self.test_set
        size = self.parallel.filled(min(self.batch_size, len(images)))
        weights, predictions = cast_to_policy(self, variables), list[dict[str, Any]]()
        for number, batch in enumerate(data.evaluation_batches(images, size, self.loading)):
            found, mask = self.parallel.get((self.predict_step(weights, batch.images), batch.mask))
            for row in np.flatnonzero(mask):
                finite, best = bool(np.isfinite(found[row]).all()), int(np.argmax(found[row]))
                result = {"class": classes[best], "probability": float(found[row, best])}
                name, truth = images.name_of(number * size + int(row))
                of_file = {"image": name} | ({} if config.images else {"truth": truth})
                predictions.append(of_file | (result if finite else {"class": None, "probability": None}))
        nonfinite = sum(line["class"] is None for line in predictions)
        check_outputs(nonfinite, len(predictions), self.unit)
        for line in predictions if config.images else ():
            known = f"{line['class']} ({line['probability']:.1%})" if line["class"] else "inf or NaN"
            say(f"{line['image']}: {known}")
        truths = Counter(line["truth"] for line in predictions if "truth" in line)
        right = Counter(line["truth"] for line in predictions if "truth" in line and line["class"] == line["truth"])
        by_class = {name: {"images": truths[name], "accuracy": right[name] / truths[name]} for name in sorted(truths)}
        results = {"policy": config.policy, "model": config.model_name, "classes": by_class, "predictions": predictions}
        folder = config.output or Path()
        write_json(folder / "predictions.json", results)
        if truths:
            pairs = [(line["truth"], line["class"]) for line in predictions]
            draw_confusion(pairs, classes, folder / "confusion.png")
        say(f"{len(predictions)} predictions in {folder / 'predictions.json'}")
        return results | {"unreadable_files": unreadable, "test_nonfinite": nonfinite}

    def _read(self, path: Path) -> np.ndarray:
        """Reads an image as in evaluation, in the model's size and colours."""
        side, _, channels = self.about.image_shape
        # A digit fills its image; the subject of a photograph is in the centre.
        view = View(side, whole=True) if channels == 1 else self.config.view._replace(side=side)
        pixels = read_crop(read_file(path), view.crop())
        return np.round(pixels.mean(axis=-1, keepdims=True)).astype(np.uint8) if channels == 1 else pixels

    def inference_step(self) -> jax.stages.Wrapped:
        return jax.jit(lambda variables, batch: self.predict_step(variables, batch.images))

    def read_initial(self, path: Any, like: Variables) -> Variables:
        return read_pretrained(path, like, self.config.model_name)

    def example_batches(self, batch_size: int) -> Sequence[Batch]:
        return [data.empty_batch(batch_size, self.about.image_shape)]

    def synthetic_batch(self) -> Batch:
        return data.random_batch(self.about, self.batch_size)

    def benchmark_settings(self) -> dict[str, Any]:
        images = {"data": self.train_set.name, "image_shape": self.about.image_shape}
        return {"model": self.config.model_name, **images}

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


# The images that the flags give: in folders or shards, of an installed package, or synthetic.


class Data(NamedTuple):
    """The images of a run, of which some may not be needed, and what a model must know about them."""

    about: Description
    train: Dataset | None = None
    test: Dataset | None = None


def open_data(config: Config, about: Description | None = None) -> Data:
    """Opens the images of the flags; `about` describes those of a trained model, which needs no training images."""
    if about is not None:
        whole = about.image_shape[-1] == 1  # a grey model sees the whole of each image of `--images`
        if whole if config.images else config.data_dir is None:
            config.refuse_flags_of_files()
        test = None if config.images else _open(config, ["val"], about.classes)[0]
        if test is not None:
            _check_same(about, test)
        return Data(about, None, test)
    if config.is_benchmark:
        # A user's model is benchmarked with ImageNet's shape and classes.
        kind = KINDS.get(config.model_name, KINDS["resnet50"])
        images = data.Synthetic((config.side, config.side, kind.image_shape[-1]), kind.classes)
        return Data(images.description, images, images)
    train, test = _open(config, ["train", "val"])
    if len(train.classes) < 2:
        raise UsageError(f"{train.name} has one class, {train.classes[0]!r}: there is nothing to learn; add another.")
    if 2 * len(train.classes) > len(train):
        found = f"{train.name}: {len(train.classes)} classes for {len(train)} images"
        print(f"{found}: are the labels captions? --label-field names the field of shards.", file=sys.stderr)
    return Data(train.description, train, test)


def _open(config: Config, splits: Sequence[str], classes: Sequence[str] | None = None) -> Sequence[Dataset]:
    if config.data_dir is None:
        return [data.EMBEDDED[config.embedded]("train" if split == "train" else "test") for split in splits]
    fields = config.image_field, config.label_field
    return open_image_folder(config.data_dir, config.view, config.max_unreadable, splits, fields, classes)


def _check_same(about: Description, images: Dataset) -> None:
    if tuple(images.classes) != about.classes:
        raise UsageError(
            f"the model has the classes {listing(about.classes)}, but {images.name} has {listing(images.classes)}. "
            "Give the --data-dir that it was trained on, or one with the same class folders."
        )
    if images.image_shape != about.image_shape:
        raise UsageError(f"the model takes images of {about.image_shape}, but {images.name} has {images.image_shape}.")


# Top-1 and top-5 accuracy.

TOP = 5


def correct(logits: Array, labels: Array) -> dict[str, jax.Array]:
    """Whether each image's label is first, and with more than five classes whether it is among the first five.

    Ties are broken by the class, as a stable sort does, so that rounded logits gain nothing.
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)[:, None]
    own = jnp.take_along_axis(logits, labels, axis=-1)
    classes = jnp.arange(logits.shape[-1])
    rank = jnp.sum((logits > own) | ((logits == own) & (classes < labels)), axis=-1)
    tops = {"accuracy": 1, **({"top5_accuracy": TOP} if logits.shape[-1] > TOP else {})}
    return {name: (rank < top).astype(jnp.float32) for name, top in tops.items()}
