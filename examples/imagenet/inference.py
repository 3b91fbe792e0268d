"""What a trained model is used for: testing, naming the classes of images, and weights in a file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import UsageError, listing
from examples.common.devices import DataParallel
from examples.common.hosts import is_main, say, wait_for_all
from examples.common.run_folder import write_json
from examples.imagenet.augmentation import Crop, middle_box
from examples.imagenet.config import Config
from examples.imagenet.data import Augmentation, Dataset, Loaded
from examples.imagenet.decoding import UnreadableImageError, read_crop
from examples.imagenet.models import Variables
from examples.imagenet.pipeline import evaluation_batches
from examples.imagenet.task import ImageTask, open_data
from examples.imagenet.weights import About, cast_weights, read_weights, trained_variables, write_weights

# How much accuracy an export may lose: a class or two of a small test set may turn over by rounding.
_TOLERANCE = 0.005


def with_trained_settings(config: Config) -> Config:
    """The flags, with those that are not given taken from the run in `--output`.

    Raises:
        UsageError: there is no run, or it is of another model.
    """
    assert config.output is not None
    try:
        saved = json.loads((config.output / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--output {str(config.output)!r} holds no run (no readable config.json).") from error
    for name in ("model", "image_size"):
        if getattr(config, name) not in (None, saved[name]):
            raise UsageError(
                f"--{name.replace('_', '-')} {getattr(config, name)}: the run in {str(config.output)!r} has "
                f"{saved[name]}. Leave the flag out, or give another --output."
            )
    data_dir = config.data_dir or (Path(saved["data_dir"]) if saved["data_dir"] else None)
    return dataclasses.replace(
        config,
        data_dir=data_dir,
        model=saved["model"],
        image_size=saved["image_size"],
        batch_size=config.batch_size or saved["batch_size"],
        ema=saved["ema"],
        accumulate=saved["accumulate"],
        clip_norm=saved["clip_norm"],
    )


class Described(Dataset):
    """What a file of weights says of the images that it is for, without any image."""

    name = "images as the weights are for"

    def __init__(self, about: About) -> None:
        self.classes, self.mean, self.std = about.classes, about.mean, about.std
        self.image_shape = about.image_shape

    def __len__(self) -> int:
        return 2**31

    def load(self, indices: np.ndarray, augmentation: Augmentation | None) -> Loaded:
        raise NotImplementedError("there are no images here, only what they would be like")


def load(config: Config) -> tuple[ImageTask, Variables]:
    """The model of `--weights`, else of `--output`, and its variables: as exported, else float32."""
    parallel = DataParallel(config.devices)
    if config.weights is None:
        config = with_trained_settings(config)
        assert config.output is not None
        task = ImageTask(config, *open_data(config), parallel)
        return task, trained_variables(task, config.output)
    variables, about = read_weights(config.weights)
    if config.mode == "predict" and config.images:
        data: tuple[Dataset, Dataset] = (Described(about), Described(about))
    else:
        data = open_data(dataclasses.replace(config, image_size=None if config.on_digits else about.image_shape[0]))
    if tuple(data[0].classes) != about.classes:
        raise UsageError(
            f"--weights {str(config.weights)!r} is for the classes {listing(about.classes)}, the data have "
            f"{listing(data[0].classes)}. Give the --data-dir that it was trained on."
        )
    task = ImageTask(dataclasses.replace(config, model=about.model), *data, parallel)
    return task, parallel.replicate(variables)


def evaluate(config: Config) -> dict[str, Any]:
    """Tests a trained model in the precision of the flags, whatever it was trained in."""
    task, variables = load(config)
    loss, accuracy = task.test(_in_policy(task, variables))
    results = {
        "policy": config.policy,
        "amp": config.amp,
        "model": task.config.model_name,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "test_images": len(task.test_set),
        "unreadable_images": task.test_set.unreadable,
    }
    if config.export is not None:
        assert config.output is not None
        results |= export(task, variables, config.output, config.export)
    return results


def export(task: ImageTask, variables: Variables, folder: Path, dtype: str) -> dict[str, Any]:
    """Writes weights for inference into the run's folder, and tests what was written against what it was made of.

    Args:
        task: of the run.
        variables: float32.
        folder: of the run.
        dtype: of the parameters in the file.

    Raises:
        UsageError: a parameter is out of range, or too much accuracy is lost; then no file is left.
    """
    float32 = ImageTask(_computing_in(task.config, "float32"), task.train_set, task.test_set, task.parallel)
    _, source = float32.test(variables)
    path = folder / f"weights_{dtype}.msgpack"
    if is_main():
        write_weights(path, cast_weights(variables, dtype), About.of(task.config.model_name, dtype, task.train_set))
    wait_for_all("export")
    exported = ImageTask(_computing_in(task.config, dtype), task.train_set, task.test_set, task.parallel)
    written, _ = read_weights(path)
    _, accuracy = exported.test(task.parallel.replicate(written))
    if not accuracy >= source - _TOLERANCE - 1 / len(task.test_set):
        path.unlink(missing_ok=True)
        raise UsageError(
            f"--export {dtype}: test accuracy {accuracy:.2%}, that of the float32 weights is {source:.2%}; the file "
            "was removed. Take another dtype."
        )
    size = path.stat().st_size
    say(f"{path}: {size / 2**20:.2f} MiB, test accuracy {accuracy:.2%} (float32 weights: {source:.2%})")
    return {"export": str(path), "export_bytes": size, "export_accuracy": accuracy, "float32_accuracy": source}


def predict(config: Config) -> dict[str, Any]:
    """Names the class of `--images`, else of all test images, into predictions.json."""
    task, variables = load(config)
    weights = _in_policy(task, variables)
    classes = task.train_set.classes
    predictions = []
    for name, probabilities in _probabilities(task, weights, config.images):
        best = int(np.argmax(probabilities))
        predictions.append({"image": name, "class": classes[best], "probability": float(probabilities[best])})
    if config.images:
        for line in predictions:
            say(f"{line['image']}: {line['class']} ({line['probability']:.1%})")
    results = {"policy": config.policy, "model": task.config.model_name, "predictions": predictions}
    folder = config.output or Path()
    if is_main():
        write_json(folder / "predictions.json", results)
    say(f"{len(predictions)} predictions in {folder / 'predictions.json'}")
    return results


def _probabilities(task: ImageTask, weights: Variables, paths: Sequence[Path]) -> Iterator[tuple[str, np.ndarray]]:
    if paths:
        images = np.stack([_read(task, path) for path in paths])
        # Whole batches of one size: one program, whatever the number of images.
        size = -(-min(task.batch_size, len(paths)) // task.parallel.count) * task.parallel.count
        for start in range(0, len(paths), size):
            part = images[start : start + size]
            padded = np.pad(part, ((0, size - len(part)), (0, 0), (0, 0), (0, 0)))
            found = task.training.predict_step(weights, task.parallel.put(padded))
            yield from zip(map(str, paths[start : start + size]), np.asarray(found), strict=False)
        return
    count = 0
    with evaluation_batches(task.test_set, task.test_batch_size, **task.loading()) as batches:
        for batch in batches:
            found = np.asarray(task.training.predict_step(weights, batch.images))
            for probabilities in found[: len(task.test_set) - count]:
                yield f"test image {count}", probabilities
                count += 1


def _read(task: ImageTask, path: Path) -> np.ndarray:
    """An image as the model is tested with: its middle, in the model's size and colours."""
    height, width, channels = task.train_set.image_shape
    on_digits = channels == 1

    def choose(full: tuple[int, int]) -> Crop:
        # A digit fills its image; a photograph's subject is in the middle of it.
        return Crop((0.0, 0.0, float(full[0]), float(full[1])) if on_digits else middle_box(full), (width, height))

    try:
        pixels = read_crop(str(path), choose)
    except UnreadableImageError as error:
        raise UsageError(f"--images: {str(path)!r} can not be read as an image ({error}).") from error
    return np.round(pixels.mean(axis=-1, keepdims=True)).astype(np.uint8) if on_digits else pixels


def _in_policy(task: ImageTask, variables: Variables) -> Variables:
    return variables | {"params": task.training.policy.cast_to_param(variables["params"])}


def _computing_in(config: Config, dtype: str) -> Config:
    policy = f"params={dtype},compute={dtype},output=float32"
    return config.with_precision({"policy": policy, "amp": "module", "loss_scale": None})
