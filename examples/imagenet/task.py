"""Image classification as a task for `examples.common.loop`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpjax
from examples.common.benchmarking import Compiled, compile_step
from examples.common.config import RunConfig
from examples.common.devices import DataParallel
from examples.common.plots import Panel
from examples.common.task import Task
from examples.common.training import Training, Variables, check_outputs, create_training, evaluation_means
from examples.imagenet.config import Config
from examples.imagenet.data import (
    Batch,
    Dataset,
    Description,
    check_batch_size,
    empty_batch,
    steps_per_epoch,
)
from examples.imagenet.embedded import EMBEDDED
from examples.imagenet.image_folder import open_image_folder
from examples.imagenet.pipeline import Batches, Shard, Workers, evaluation_batches, train_batches
from examples.imagenet.pretrained import read_pretrained
from examples.imagenet.synthetic import random_batch
from examples.imagenet.training import Classifier, create_classifier


def open_data(
    config: Config, splits: Sequence[str] = ("train", "val"), classes: Sequence[str] | None = None
) -> list[Dataset]:
    """Opens the images given by the flags, one dataset per split; `classes` are those of a trained model."""
    if config.data_dir is None:
        return [EMBEDDED[config.embedded]("train" if split == "train" else "test") for split in splits]
    return list(
        open_image_folder(
            config.data_dir,
            config.side,
            config.flip,
            config.workers,
            config.max_unreadable,
            cache=config.cache,
            whole=config.whole,
            splits=splits,
            classes=classes,
        )
    )


class ImageTask(Task):
    """A model with its data, on all devices.

    Args:
        config: The flags.
        parallel: The devices.
        train_set, test_set: The images; one may be None if not needed, or both if `description` is given.
        description: The properties of the images that the model depends on; by default those of `train_set`.
    """

    unit = "images"
    metric, metric_name = ("test_accuracy", 1), "test accuracy"

    def __init__(
        self,
        config: Config,
        parallel: DataParallel,
        train_set: Dataset | None = None,
        test_set: Dataset | None = None,
        description: Description | None = None,
    ) -> None:
        super().__init__(config, parallel)
        self.config: Config = config
        known = train_set or test_set
        if description is None:
            assert known is not None
            description = known.description
        self.about = description
        self._train_set, self._test_set = train_set, test_set
        self.steps = 1
        if train_set is not None:
            check_batch_size(train_set, self.batch_size)
            self.steps = steps_per_epoch(train_set, self.batch_size)
        parallel.check(self.batch_size)
        if test_set is not None:
            # A test set smaller than a batch is not padded to a full batch.
            self.test_batch_size = min(self.batch_size, -(-len(test_set) // parallel.count) * parallel.count)
        self.title = f"{config.model_name} on {known.name if known else 'images'}, policy {config.policy}"
        self.panels = _panels(config.preset.label_smoothing, tested=config.mode == "train_and_evaluate")
        self._stream: Batches | None = None
        self._test: Compiled | None = None
        self._classifier: Classifier | None = None

    def with_config(self, config: RunConfig) -> ImageTask:
        assert isinstance(config, Config)
        return ImageTask(config, self.parallel, self._train_set, self._test_set, self.about)

    @property
    def train_set(self) -> Dataset:
        assert self._train_set is not None
        return self._train_set

    @property
    def test_set(self) -> Dataset:
        assert self._test_set is not None
        return self._test_set

    @property
    def test_count(self) -> int:  # type: ignore[override]  # Task has it as an attribute
        return len(self.test_set)

    @property
    def from_files(self) -> bool:  # type: ignore[override]  # Task has it as an attribute
        return self.config.data_dir is not None

    @property
    def max_batch_size(self) -> int:  # type: ignore[override]  # Task has it as an attribute
        return len(self.train_set)

    @property
    def table_metrics(self) -> dict[str, str]:
        if self.config.mode == "train":
            return {"train_accuracy": "training accuracy"}
        return super().table_metrics

    @property
    def classifier(self) -> Classifier:
        """The model given by the flags, built on first access."""
        if self._classifier is None:
            self._classifier = create_classifier(self.config, self.about)
        return self._classifier

    def training_of(self, config: RunConfig, data: dict[str, Any]) -> Training:
        assert isinstance(config, Config)
        model = self.classifier.model if config == self.config else create_classifier(config, self.about).model
        policy = mpjax.get_policy(config.policy)
        return create_training(model, config.hyperparameters(self.steps), policy, config.loss_scale, self.parallel)

    def headline(self) -> str:
        return (
            f"{self.config.model_name}, policy {self.policy}, {len(self.train_set):,} training and "
            f"{len(self.test_set):,} test images, on {self.parallel.count} x {jax.devices()[0].device_kind}"
        )

    def description(self) -> dict[str, Any]:
        return self.about._asdict()

    def example_batches(self, batch_size: int) -> Sequence[Batch]:
        return [empty_batch(batch_size, self.about.image_shape)]

    def synthetic_batch(self) -> Batch:
        return random_batch(self.about, self.batch_size // jax.process_count())

    def inference_step(self) -> jax.stages.Wrapped:
        predict = self.classifier.predict_step
        return jax.jit(lambda variables, batch: predict(variables, batch.images))

    def benchmark_settings(self) -> dict[str, Any]:
        data = {"data": self.train_set.name, "image_shape": self.about.image_shape}
        return {"model": self.config.model_name, **data}

    def compile(self) -> None:
        super().compile()
        if self.config.mode == "train_and_evaluate":
            self._compile_test()

    def _compile_test(self) -> Compiled:
        abstract = self.abstract_state()
        weights = jax.eval_shape(self.training.weights, abstract)
        sums = self.parallel.like_state(jax.eval_shape(self._zero))
        batch = self.parallel.like_batch(empty_batch(self.test_batch_size, self.about.image_shape))
        self._test = compile_step(self.classifier.test_step, self.parallel.like_state(weights), sums, batch)
        return self._test

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        if self._stream is None:
            self._stream = train_batches(
                self.train_set,
                self.batch_size,
                self.config.seed,
                first=epoch * self.steps + first,
                last=self.epochs * self.steps if self.config.action == "train" else None,
                augment=self.config.augment,
                **self.loading(),
            )
        # One stream over all epochs, so that the next epoch's first batches load during evaluation.
        return itertools.islice(self._stream, self.steps - first)

    def put(self, batch: Batch) -> Batch:
        return batch  # the pipeline has already done it

    def test(
        self, weights: Variables, between_steps: Callable[[], None] = lambda: None, *, last: bool = True
    ) -> dict[str, Any]:
        step = self._test or self._compile_test()
        sums = self.parallel.replicate(self._zero())
        with evaluation_batches(self.test_set, self.test_batch_size, **self.loading()) as batches:
            for batch in batches:
                between_steps()
                sums = step.call(weights, sums, batch)
        found = evaluation_means(sums)
        check_outputs(found["nonfinite"], int(sums["count"]), self.unit, last)
        return {f"test_{name}": value for name, value in found.items()}

    def _zero(self) -> dict[str, Any]:
        return {name: np.zeros((), np.float32) for name in self.classifier.test_metrics}

    def epoch_text(self, line: dict[str, Any]) -> str:
        return "  ".join(
            f"{split} {line[f'{split}_loss']:.4f} {line[f'{split}_accuracy']:.2%}"
            for split in ("train", "test")
            if f"{split}_loss" in line
        )

    def summary(self, last: dict[str, Any]) -> dict[str, Any]:
        config = self.config
        metrics = {name: last[name] for name in last if name.startswith(("train_", "test_"))}
        return metrics | {
            "amp": config.amp,
            "seed": config.seed,
            "batch_size": self.batch_size,
            "learning_rate": self.training.hyper.learning_rate,
            "model": config.model_name,
            "train_images": len(self.train_set),
            "test_images": len(self.test_set),
            "unreadable_images": self.train_set.unreadable + self.test_set.unreadable,
        }

    def data_state(self) -> dict[str, Any]:
        sets = {"train_set": self._train_set, "test_set": self._test_set}
        return {name: images.state() for name, images in sets.items() if images is not None}

    def restore_data(self, state: dict[str, Any]) -> None:
        self.train_set.restore(state["train_set"])
        self.test_set.restore(state["test_set"])

    def read_initial(self, path: Path, like: Variables) -> Variables:
        return read_pretrained(path, like, self.config.model_name)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def loading(self) -> dict[str, Any]:
        """Pipeline arguments with which this process loads its part of each batch."""
        return {
            "shard": Shard(jax.process_index(), jax.process_count()),
            "workers": Workers(self.config.workers, self.config.worker_kind),
            "put": self.parallel.put,
        }


def _panels(label_smoothing: float, tested: bool) -> list[Panel]:
    train = f"train (label smoothing {label_smoothing:g})" if label_smoothing else "train"
    loss, accuracy = {train: "train_loss"}, {"train": "train_accuracy"}
    if tested:
        loss["test"], accuracy["test"] = "test_loss", "test_accuracy"
    return [Panel("loss", loss), Panel("accuracy", accuracy, percent=True)]
