"""Predicts the classes of images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from examples.common.cli import UsageError, disk_problem, each_readable
from examples.common.devices import say
from examples.common.modes import cast_to_policy
from examples.common.run_folder import write_json
from examples.common.training import Variables, check_outputs
from examples.imagenet.decoding import View, read_crop
from examples.imagenet.pipeline import evaluation_batches


def predict(task: Any, variables: Variables) -> dict[str, Any]:
    """Writes the predicted classes of `--images`, or else of all test images, to predictions.json."""
    config, classes = task.config, task.about.classes
    readable, unreadable = each_readable(config.images, lambda path: _read(task, path), "--images")
    predictions = []
    for place, probabilities in _probabilities(task, cast_to_policy(task, variables), readable):
        best, finite = int(np.argmax(probabilities)), bool(np.isfinite(probabilities).all())
        found = {"class": classes[best], "probability": float(probabilities[best])}
        predictions.append({**place, **(found if finite else {"class": None, "probability": None})})
    check_outputs(sum(line["class"] is None for line in predictions), len(predictions), task.unit)
    if config.images:
        for line in predictions:
            known = f"{line['class']} ({line['probability']:.1%})" if line["class"] else "inf or NaN"
            say(f"{line['image']}: {known}")
    truths = Counter(line["truth"] for line in predictions if "truth" in line)
    right = Counter(line["truth"] for line in predictions if "truth" in line and line["class"] == line["truth"])
    by_class = {name: {"images": truths[name], "accuracy": right[name] / truths[name]} for name in sorted(truths)}
    results = {"policy": config.policy, "model": config.model_name, "classes": by_class, "predictions": predictions}
    folder = config.output or Path()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "predictions.json", results)
    except OSError as error:
        raise UsageError(f"--output {str(folder)!r} cannot be written to: {disk_problem(error)}.") from error
    say(f"{len(predictions)} predictions in {folder / 'predictions.json'}")
    return results | {"unreadable_files": unreadable}


def _probabilities(
    task: Any, weights: Variables, read: Mapping[Path, np.ndarray]
) -> Iterator[tuple[dict[str, str], np.ndarray]]:
    """The location of each image, its true class if known, and the class probabilities."""
    predict_step = task.predict_step
    if read:
        paths, images = list(read), np.stack(list(read.values()))
        # Full batches of one size compile only one program for any number of images.
        size = -(-min(task.batch_size, len(paths)) // task.parallel.count) * task.parallel.count
        for start in range(0, len(paths), size):
            part = images[start : start + size]
            padded = np.pad(part, ((0, size - len(part)), (0, 0), (0, 0), (0, 0)))
            found = np.asarray(predict_step(weights, task.parallel.put(padded)))
            for path, probabilities in zip(paths[start : start + size], found, strict=False):
                yield {"image": str(path)}, probabilities
        return
    count = 0
    with evaluation_batches(task.test_set, task.test_batch_size, **task.loading()) as batches:
        for batch in batches:
            found = np.asarray(predict_step(weights, batch.images))
            readable = np.asarray(batch.mask)
            for probabilities, mask in zip(found[: len(task.test_set) - count], readable, strict=False):
                image, truth = task.test_set.name_of(count)
                count += 1
                if mask:
                    yield {"image": image, "truth": truth}, probabilities


def _read(task: Any, path: Path) -> np.ndarray:
    """Reads an image as in evaluation, in the model's size and colours."""
    height, width, channels = task.about.image_shape
    # A digit fills its image; the subject of a photograph is in the centre.
    view = View(whole=True) if channels == 1 else task.config.view
    pixels = read_crop(str(path), lambda full: view.of_test(full, (width, height)))
    return np.round(pixels.mean(axis=-1, keepdims=True)).astype(np.uint8) if channels == 1 else pixels
