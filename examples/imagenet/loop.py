"""The run: epochs of steps, evaluation, progress, checkpoints, and what is left in the output folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpjax
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.interruption import Interruption
from examples.common.plots import Panel, plot_curves
from examples.common.run_folder import RunFolder
from examples.imagenet.config import Config
from examples.imagenet.data import (
    Augmentation,
    Batch,
    Dataset,
    Digits,
    check_batch_size,
    evaluation_batches,
    train_batches,
)
from examples.imagenet.image_folder import open_image_folder
from examples.imagenet.progress import Progress
from examples.imagenet.training import Totals, Training, TrainState, create_training

RUNS = Path("runs/imagenet")


class Interrupted(Exception):
    """A signal ended the run; its state is saved.

    Attributes:
        output: the folder of the run, to resume from.
        exit_code: what the process should exit with.
    """

    def __init__(self, interruption: Interruption, output: Path, step: int) -> None:
        name = interruption.signal.name if interruption.signal else "a signal"
        super().__init__(f"stopped by {name} after step {step}")
        self.output, self.exit_code = output, interruption.exit_code


def run(config: Config) -> dict[str, Any]:
    """Trains as the flags say and returns what is in summary.json.

    Raises:
        UsageError: data or flags do not fit.
        Interrupted: a signal came; all is saved.
    """
    train_set, test_set = open_data(config)
    check_batch_size(train_set, config.batch_size)
    settings = config.settings()
    if config.resume:
        folder = RunFolder.reopen(config.output, settings)
        if folder.summary is not None:
            print(f"the run in {folder.path} has already finished")
            return folder.summary
    else:
        folder = RunFolder.create(config.output, RUNS, settings)
    with Interruption() as interruption, Checkpoints(folder.checkpoints) as checkpoints:
        return _Run(config, folder, checkpoints, interruption, train_set, test_set).finish()


def open_data(config: Config) -> tuple[Dataset, Dataset]:
    """The training and the test images that the flags name."""
    if config.data_dir is None:
        return Digits("train"), Digits("test")
    size = config.image_size or 224
    return open_image_folder(config.data_dir, size, config.flip, config.workers, config.max_unreadable)


class _Run:
    """One run and all that it holds open; `finish` does it."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        checkpoints: Checkpoints,
        interruption: Interruption,
        train_set: Dataset,
        test_set: Dataset,
    ) -> None:
        self.config, self.folder, self.checkpoints = config, folder, checkpoints
        self.interruption, self.train_set, self.test_set = interruption, train_set, test_set
        self.steps = len(train_set) // config.batch_size  # of an epoch
        self.training = create_training(config, train_set, self.steps * config.epochs)
        self.state, self.epoch, self.batch = self.training.state, 0, 0
        self.trained_images, self.trained_seconds, self.saved = 0, 0.0, time.monotonic()
        if config.resume:
            self.state, position = checkpoints.restore(self.state)
            self.epoch, self.batch = position["epoch"], position["batch"]
            folder.keep_metrics(self.epoch)

    def finish(self) -> dict[str, Any]:
        """Trains to the last epoch: a line for each, and a checkpoint with the curves now and then."""
        config, done = self.config, self.epoch * self.steps + self.batch
        print(
            f"{config.model_name} with {_size(self.state.params):,} parameters, policy {config.policy}, "
            f"{len(self.train_set):,} training and {len(self.test_set):,} test images, on {_device()}"
        )
        started = time.perf_counter()
        train_step, test_step = _compile(self.training, self.state, self.train_set, self.test_set, config.batch_size)
        print(f"compiled in {time.perf_counter() - started:.1f} s; output in {self.folder.path}")
        with Progress(config, self.steps, done) as progress:
            while self.epoch < config.epochs:
                self._train_epoch(train_step, progress)
                line = self._evaluate(test_step, progress)
                self.folder.append_metrics(line)
                progress.epoch_done(line)
                self.epoch, self.batch = self.epoch + 1, 0
                self.state = self.state._replace(totals=Totals.zero())
        self._save()
        return self._summarise()

    def _train_epoch(self, train_step: Any, progress: Progress) -> None:
        config = self.config
        augmentation = Augmentation(config.seed, self.epoch)
        started = time.perf_counter()
        progress.epoch_started(self.epoch)
        first = self.batch
        for batch in train_batches(self.train_set, config.batch_size, augmentation, config.augment, first):
            self._save_or_stop()
            self.state, shown = train_step(self.state, batch)
            self.batch += 1
            progress.step(shown)
        jax.block_until_ready(self.state)
        progress.epoch_trained()
        self.trained_seconds += time.perf_counter() - started
        self.trained_images += (self.batch - first) * config.batch_size
        self._check_progress()

    def _evaluate(self, test_step: Any, progress: Progress) -> dict[str, Any]:
        totals = Totals.zero()
        for batch in evaluation_batches(self.test_set, self.config.batch_size):
            self._save_or_stop()
            totals = test_step(self.state, totals, batch)
        train_loss, train_accuracy = self.state.totals.means()
        test_loss, test_accuracy = totals.means()
        step = int(self.state.step)
        return {
            "epoch": self.epoch + 1,
            "step": step,
            "train_loss": train_loss,
            "train_accuracy": train_accuracy,
            "test_loss": test_loss,
            "test_accuracy": test_accuracy,
            "learning_rate": float(self.training.learning_rate(step)),
            "loss_scale": float(self.state.opt_state.loss_scale),
            "skipped_steps": int(self.state.opt_state.skipped_steps),
            "images_per_second": progress.images_per_second,
        }

    def _save_or_stop(self) -> None:
        """Between two steps: a checkpoint where it is time for one, and the end where a signal came."""
        interrupted = self.interruption.signal is not None
        if interrupted or time.monotonic() - self.saved > self.config.save_every:
            self._save()
        if interrupted:
            raise Interrupted(self.interruption, self.folder.path, int(self.state.step))

    def _check_progress(self) -> None:
        try:
            mpjax.check_progress(self.state.opt_state)
        except mpjax.LossScaleError as error:
            raise UsageError(
                f"training diverged in epoch {self.epoch + 1}: {error} A lower --learning-rate (now "
                f"{self.config.learning_rate}) or --policy float32 may help."
            ) from error

    def _save(self) -> None:
        position = {"epoch": self.epoch, "batch": self.batch}
        self.checkpoints.save(int(self.state.step), self.state, position)
        self._plot()
        self.saved = time.monotonic()

    def _plot(self) -> None:
        smoothing = self.config.label_smoothing
        train = f"train (label smoothing {smoothing:g})" if smoothing else "train"
        plot_curves(
            self.folder.curves,
            self.folder.metrics,
            f"{self.config.model_name} on {self.train_set.name}, policy {self.config.policy}",
            [
                Panel("loss", {train: "train_loss", "test": "test_loss"}),
                Panel("accuracy", {"train": "train_accuracy", "test": "test_accuracy"}, percent=True),
            ],
        )

    def _summarise(self) -> dict[str, Any]:
        config, last = self.config, self.folder.metrics[-1]
        speed = self.trained_images / self.trained_seconds if self.trained_seconds else last["images_per_second"]
        summary = {
            "policy": config.policy,
            "amp": config.amp,
            "test_accuracy": last["test_accuracy"],
            "test_loss": last["test_loss"],
            "images_per_second": speed,
            "loss_scale": last["loss_scale"],
            "skipped_steps": last["skipped_steps"],
            "seed": config.seed,
            "epochs": config.epochs,
            "batch_size": config.batch_size,
            "learning_rate": config.learning_rate,
            "model": config.model_name,
            "parameters": _size(self.state.params),
            "train_images": len(self.train_set),
            "test_images": len(self.test_set),
            "unreadable_images": self.train_set.unreadable + self.test_set.unreadable,
            "device": _device(),
            "versions": {"mpjax": mpjax.__version__, "jax": jax.__version__},
        }
        self.folder.write_summary(summary)
        return summary


def _compile(training: Training, state: TrainState, train_set: Dataset, test_set: Dataset, batch_size: int) -> Any:
    """Both steps as executables: compiled before the clock runs, they refuse any other shape or dtype."""
    train = batch_like(train_set, batch_size)
    test = batch_like(test_set, min(batch_size, len(test_set)))
    return (
        training.train_step.lower(state, train).compile(),
        training.test_step.lower(state, Totals.zero(), test).compile(),
    )


def batch_like(dataset: Dataset, batch_size: int) -> Batch:
    """An empty batch, for its shapes."""
    return Batch(
        np.zeros((batch_size, *dataset.image_shape), np.uint8),
        np.zeros(batch_size, np.int32),
        np.zeros(batch_size, np.float32),
    )


def _size(params: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def _device() -> str:
    return jax.devices()[0].device_kind
