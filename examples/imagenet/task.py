"""Image classification as what `examples.common.loop` trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from examples.common.benchmarking import Compiled, compile_step
from examples.common.checkpoints import Checkpoints
from examples.common.devices import DataParallel
from examples.common.hosts import say
from examples.common.loop import Task
from examples.common.plots import Panel
from examples.imagenet.config import PRECISION, Config
from examples.imagenet.data import Batch, Dataset, Digits, check_batch_size, steps_per_epoch
from examples.imagenet.image_folder import open_image_folder
from examples.imagenet.pipeline import Batches, Shard, Workers, evaluation_batches, train_batches
from examples.imagenet.precision_change import change_precision
from examples.imagenet.training import Totals, Training, TrainState, create_training


def open_data(config: Config) -> tuple[Dataset, Dataset]:
    """The training and the test images that the flags name."""
    if config.data_dir is None:
        return Digits("train"), Digits("test")
    return open_image_folder(config.data_dir, config.side, config.flip, config.workers, config.max_unreadable)


class ImageTask(Task):
    """A model with its data, on all devices."""

    unit = "images"

    def __init__(self, config: Config, train_set: Dataset, test_set: Dataset, parallel: DataParallel) -> None:
        self.config, self.train_set, self.test_set, self.parallel = config, train_set, test_set, parallel
        preset = config.preset
        self.batch_size, self.epochs, self.policy = preset.batch_size, preset.epochs, config.policy
        check_batch_size(train_set, self.batch_size)
        parallel.check(self.batch_size)
        # A test set that is smaller than a batch is not filled up to one.
        self.test_batch_size = min(self.batch_size, -(-len(test_set) // parallel.count) * parallel.count)
        self.steps = steps_per_epoch(train_set, self.batch_size)
        self.training = self.training_of(config)
        self.title = f"{config.model_name} on {train_set.name}, policy {config.policy}"
        self.panels = _panels(preset.label_smoothing, tested=config.mode == "train_and_evaluate")
        self._stream: Batches | None = None
        self._train: Compiled | None = None
        self._test: Compiled | None = None

    def training_of(self, config: Config) -> Training:
        """The set-up that other flags, say of another precision, would have given."""
        return create_training(config, self.train_set, config.hyperparameters(self.steps), self.parallel)

    def initial_state(self) -> TrainState:
        return self.training.init(jax.random.key(self.config.seed))

    def abstract_state(self, training: Training | None = None) -> Any:
        """Shapes, dtypes and shardings of the state."""
        init = (training or self.training).init
        return self.parallel.like_state(jax.eval_shape(init, jax.random.key(0)))

    def compile(self) -> None:
        """Executables, before the clock runs; they refuse any other shape or dtype."""
        state = self.abstract_state()
        say(
            f"{self.config.model_name}, policy {self.policy}, {len(self.train_set):,} training and "
            f"{len(self.test_set):,} test images, on {self.parallel.count} x {jax.devices()[0].device_kind}"
        )
        self._train = compile_step(self.training.train_step, state, self.abstract_batch(self.batch_size))
        if self.config.mode == "train_and_evaluate":
            self.compile_test()

    def compile_test(self) -> None:
        weights = jax.eval_shape(self.training.weights, self.abstract_state())
        totals = jax.eval_shape(Totals.zero)
        like = self.parallel.like_state
        batch = self.abstract_batch(self.test_batch_size)
        self._test = compile_step(self.training.test_step, like(weights), like(totals), batch)

    def abstract_batch(self, batch_size: int) -> Batch:
        """What a batch of that size is, on all devices."""
        return self.parallel.like_batch(batch_like(self.train_set, batch_size))

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        if self._stream is None:
            config = self.config
            self._stream = train_batches(
                self.train_set,
                self.batch_size,
                config.seed,
                first=epoch * self.steps + first,
                last=self.epochs * self.steps,
                augment=config.augment,
                **self.loading(),
            )
        # One stream over all epochs: the next one's first batches are made while this one is tested.
        return itertools.islice(self._stream, self.steps - first)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
        assert self._train is not None
        return self._train.call(state, batch)

    def test(self, weights: Any, between_steps: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Loss and accuracy on the test images."""
        if self._test is None:
            self.compile_test()
        assert self._test is not None
        totals = self.parallel.replicate(Totals.zero())
        with evaluation_batches(self.test_set, self.test_batch_size, **self.loading()) as batches:
            for batch in batches:
                between_steps()
                totals = self._test.call(weights, totals, batch)
        return totals.means()

    def epoch_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        line: dict[str, Any] = {}
        line["train_loss"], line["train_accuracy"] = state.totals.means()
        if self.config.mode == "train_and_evaluate":
            line["test_loss"], line["test_accuracy"] = self.test(self.training.weights(state), between_steps)
        updates = int(state.step) // self.config.accumulate
        return line | {"learning_rate": float(self.training.learning_rate(updates))}

    def next_epoch(self, state: TrainState) -> TrainState:
        return state._replace(totals=self.parallel.replicate(Totals.zero()))

    def items(self, batch: Batch) -> int:
        return self.batch_size

    def bar_text(self, shown: Any) -> str:
        loss, accuracy = shown["totals"].means()
        return (
            f"loss {loss:.4f}, accuracy {accuracy:.2%}, loss scale {shown['loss_scale']:g}, "
            f"skipped steps {shown['skipped_steps']}"
        )

    def epoch_text(self, line: dict[str, Any]) -> str:
        return "  ".join(
            f"{split} loss {line[f'{split}_loss']:.4f} accuracy {line[f'{split}_accuracy']:.2%}"
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
            "learning_rate": config.hyperparameters(self.steps).learning_rate,
            "model": config.model_name,
            "train_images": len(self.train_set),
            "test_images": len(self.test_set),
            "unreadable_images": self.train_set.unreadable + self.test_set.unreadable,
        }

    def position(self) -> dict[str, Any]:
        precision = {name: getattr(self.config, name) for name in PRECISION}
        return {"precision": precision, "train_set": self.train_set.state(), "test_set": self.test_set.state()}

    def restore_as_saved(self, checkpoints: Checkpoints) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest state in the precision that it was trained in."""

        def like(position: dict[str, Any]) -> Any:
            return self.abstract_state(self.training_of(self.config.with_precision(position["precision"])))

        return checkpoints.restore(like)

    def restore(self, checkpoints: Checkpoints) -> tuple[TrainState, dict[str, Any]] | None:
        restored = self.restore_as_saved(checkpoints)
        if restored is None:
            return None
        state, position = restored
        self.train_set.restore(position["train_set"])
        self.test_set.restore(position["test_set"])
        if position["precision"] == self.position()["precision"]:
            return state, position
        state = change_precision(state, self.initial_state(), self.training.policy)
        before = position["precision"]["policy"]
        say(
            f"from policy {before} to {self.policy}: parameters, statistics and the optimizer's state carry over; the "
            f"loss scale starts at {float(state.opt_state.loss_scale):g}, skipped steps are counted on"
        )
        return state, position

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def loading(self) -> dict[str, Any]:
        """How this process loads its part of each batch: arguments of the pipeline."""
        return {
            "shard": Shard(jax.process_index(), jax.process_count()),
            "workers": Workers(self.config.workers),
            "put": self.parallel.put,
        }


def batch_like(dataset: Dataset, batch_size: int) -> Batch:
    """An empty batch."""
    return Batch(
        np.zeros((batch_size, *dataset.image_shape), np.uint8),
        np.zeros(batch_size, np.int32),
        np.zeros(batch_size, np.float32),
    )


def _panels(label_smoothing: float, tested: bool) -> list[Panel]:
    train = f"train (label smoothing {label_smoothing:g})" if label_smoothing else "train"
    loss, accuracy = {train: "train_loss"}, {"train": "train_accuracy"}
    if tested:
        loss["test"], accuracy["test"] = "test_loss", "test_accuracy"
    return [Panel("loss", loss), Panel("accuracy", accuracy, percent=True)]
