"""The run of a training script: epochs of steps, evaluation, checkpoints, resuming, and what is left in its folder.

A script says what it trains as a `Task`; `train` does the rest.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import mpjax
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError
from examples.common.hosts import is_main, on_any, say, wait_for_all
from examples.common.input_clock import InputClock
from examples.common.interruption import Interruption
from examples.common.plots import Panel, plot_curves
from examples.common.progress import Progress
from examples.common.run_folder import RunFolder
from examples.common.tensorboard import EventFiles

# Steps between two times that several processes ask each other whether to save or stop: it makes them wait.
_AGREE_EVERY = 10


class Interrupted(Exception):
    """A signal ended the run; its state is saved.

    Attributes:
        output: the folder of the run, to resume from.
        exit_code: what the process should exit with.
    """

    def __init__(self, interruption: Interruption, output: Path, step: int) -> None:
        name = interruption.signal.name if interruption.signal else "a signal to another process"
        super().__init__(f"stopped by {name} after step {step}")
        self.output, self.exit_code = output, interruption.exit_code


class Task(abc.ABC):
    """What a run trains.

    Attributes:
        title: of the curves.
        unit: what is counted in a batch, in the plural: "images".
        policy: the precision, as the flag says it.
        epochs: passes over the data.
        steps: of an epoch.
        panels: of the curves, beside that of the loss scale.
    """

    title: str
    unit: str
    policy: str
    epochs: int
    steps: int
    panels: Sequence[Panel]

    @abc.abstractmethod
    def initial_state(self) -> Any:
        """What training starts from: a pytree with `step` (int32), `params` and `opt_state`, an mpjax loss scale's."""

    @abc.abstractmethod
    def compile(self) -> None:
        """Compiles what the run needs, so that the first step is no slower than the others."""

    @abc.abstractmethod
    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """The training batches of an epoch from number `first` on, the same in every run."""

    @abc.abstractmethod
    def train_step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The next state, and a pytree of numbers for the bar, all left on the device; may donate the state."""

    @abc.abstractmethod
    def bar_text(self, shown: Any) -> str:
        """What the bar says of a step's numbers, which are on the host."""

    @abc.abstractmethod
    def epoch_metrics(self, state: Any, between_steps: Callable[[], None]) -> dict[str, Any]:
        """Training and test metrics after an epoch; `between_steps` is to be called before each test step."""

    @abc.abstractmethod
    def epoch_text(self, line: dict[str, Any]) -> str:
        """The line of an epoch for people; the loop adds speed, loss scale and skipped steps."""

    def next_epoch(self, state: Any) -> Any:
        """The state that an epoch starts from: the place to reset its sums."""
        return state

    def items(self, batch: Any) -> int:
        """How many of `unit` a batch of all processes has."""
        return len(jax.tree.leaves(batch)[0])

    def summary(self, last: dict[str, Any]) -> dict[str, Any]:
        """What summary.json says beyond what the loop knows; `last` is the last epoch's line."""
        return {}

    def position(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the state and the number of the batch, as JSON."""
        return {}

    def restore(self, checkpoints: Checkpoints) -> tuple[Any, dict[str, Any]] | None:
        """The newest state with its position, or None where nothing was saved yet."""
        return checkpoints.restore(lambda position: jax.eval_shape(self.initial_state))

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Lets go of what the run held open."""


def open_folder(
    output: Path | None,
    parent: Path,
    settings: Mapping[str, Any],
    *,
    resume: bool,
    may_change: Collection[str] = (),
) -> RunFolder:
    """The folder of a new or an interrupted run, on every process of it.

    Args:
        output: from the flag, or None for the next number in `parent`.
        settings: what decides the result, as JSON; of an interrupted run they must be the same,
        may_change: but for these.

    Raises:
        UsageError: the folder holds a run, or none, or another one.
    """
    if jax.process_count() > 1 and output is None:
        raise UsageError("a run of several processes needs --output DIR, a folder that all of them share.")
    folder = RunFolder(output or parent)
    if is_main():
        if resume:
            folder = RunFolder.reopen(output, settings, may_change)
        else:
            folder = RunFolder.create(output, parent, settings)
    wait_for_all("folder")
    return folder


def train(
    task: Task, folder: RunFolder, checkpoints: Checkpoints, *, resume: bool, save_every: float
) -> dict[str, Any]:
    """Trains to the last epoch and returns what is in summary.json.

    Args:
        task: what to train.
        folder: of the run, made or reopened by the caller.
        checkpoints: in that folder.
        resume: whether to go on from the newest checkpoint.
        save_every: seconds between two checkpoints; there is one at the end and on a signal anyway.

    Raises:
        UsageError: training diverged, or the checkpoint is not of this model.
        Interrupted: a signal came; all is saved.
    """
    with Interruption() as interruption, EventFiles(folder.path) as events:
        try:
            return _Run(task, folder, checkpoints, interruption, events, save_every).finish(resume)
        finally:
            task.close()


class _Run:
    """One run and all that it holds open; `finish` does it."""

    def __init__(
        self,
        task: Task,
        folder: RunFolder,
        checkpoints: Checkpoints,
        interruption: Interruption,
        events: EventFiles,
        save_every: float,
    ) -> None:
        self.task, self.folder, self.checkpoints = task, folder, checkpoints
        self.interruption, self.events, self.save_every = interruption, events, save_every
        self.state: Any = None
        self.epoch, self.batch = 0, 0
        self.items, self.seconds, self.input_share = 0, 0.0, 0.0
        self.saved, self.looks = time.monotonic(), 0

    def finish(self, resume: bool) -> dict[str, Any]:
        """Trains to the last epoch: a line for each, and a checkpoint with the curves now and then."""
        task = self.task
        if not (resume and self._restore()):
            self.state = task.initial_state()
        self.lines = self.folder.metrics
        started = time.perf_counter()
        task.compile()
        say(f"compiled in {time.perf_counter() - started:.1f} s; output in {self.folder.path}")
        done = self.epoch * task.steps + self.batch
        with Progress(task.epochs, task.steps, done, task.unit, task.bar_text) as progress:
            while self.epoch < task.epochs:
                self._train_epoch(progress)
                line = self._epoch_line(progress)
                self.lines.append(line)
                if is_main():
                    self.folder.append_metrics(line)
                self.events.write(line)
                progress.epoch_done(self._epoch_text(line))
                self.epoch, self.batch = self.epoch + 1, 0
                self.state = task.next_epoch(self.state)
        self._save()
        return self._summarise()

    def _restore(self) -> bool:
        restored = self.task.restore(self.checkpoints)
        if restored is None:
            say("nothing was saved yet: the run starts anew")
        else:
            self.state, position = restored
            self.epoch, self.batch = position["epoch"], position["batch"]
            self.events.resume_after(int(self.state.step))
        if is_main():
            self.folder.keep_metrics(self.epoch)
        wait_for_all("metrics")
        return restored is not None

    def _train_epoch(self, progress: Progress) -> None:
        progress.epoch_started(self.epoch)
        clock = InputClock()
        for batch in clock.batches(self.task.batches(self.epoch, self.batch)):
            self._save_or_stop()
            items = self.task.items(batch)
            self.state, shown = self.task.train_step(self.state, batch)
            clock.dispatched(shown)
            self.batch += 1
            progress.step(shown, items)
        jax.block_until_ready(self.state)
        items, seconds = progress.epoch_trained()
        self.items, self.seconds = self.items + items, self.seconds + seconds
        self.input_share = clock.seconds / seconds
        self._check_progress()

    def _epoch_line(self, progress: Progress) -> dict[str, Any]:
        metrics = self.task.epoch_metrics(self.state, self._save_or_stop)
        scaling = self.state.opt_state
        return {
            "epoch": self.epoch + 1,
            "step": int(self.state.step),
            **metrics,
            "policy": self.task.policy,
            "loss_scale": float(scaling.loss_scale),
            "skipped_steps": int(scaling.skipped_steps),
            f"{self.task.unit}_per_second": progress.items_per_second,
            "input_share": self.input_share,
        }

    def _epoch_text(self, line: dict[str, Any]) -> str:
        unit = self.task.unit
        return (
            f"epoch {line['epoch']:3d}/{self.task.epochs}  {self.task.epoch_text(line)}  "
            f"{line[f'{unit}_per_second']:,.0f} {unit}/s (input {line['input_share']:.0%})  "
            f"loss scale {line['loss_scale']:g}  skipped {line['skipped_steps']}"
        )

    def _save_or_stop(self) -> None:
        """Between two steps: a checkpoint where it is time for one, and the end where a signal came."""
        self.looks += 1
        if jax.process_count() > 1 and self.looks % _AGREE_EVERY:
            return
        interrupted, due = on_any(self.interruption.signal is not None, time.monotonic() - self.saved > self.save_every)
        if interrupted or due:
            self._save()
        if interrupted:
            raise Interrupted(self.interruption, self.folder.path, int(self.state.step))

    def _check_progress(self) -> None:
        try:
            mpjax.check_progress(self.state.opt_state)
        except mpjax.LossScaleError as error:
            raise UsageError(
                f"training diverged in epoch {self.epoch + 1}: {error} A lower --learning-rate or "
                "--policy float32 may help."
            ) from error

    def _save(self) -> None:
        position = {"epoch": self.epoch, "batch": self.batch, **self.task.position()}
        self.checkpoints.save(int(self.state.step), self.state, position)
        if is_main():
            plot_curves(self.folder.curves, self.lines, self.task.title, self.task.panels)
        self.saved = time.monotonic()

    def _summarise(self) -> dict[str, Any]:
        last, speed = self.lines[-1], f"{self.task.unit}_per_second"
        summary = {
            "policy": self.task.policy,
            **self.task.summary(last),
            speed: self.items / self.seconds if self.seconds else last[speed],
            "loss_scale": last["loss_scale"],
            "skipped_steps": last["skipped_steps"],
            "input_share": float(np.mean([line["input_share"] for line in self.lines])),
            "epochs": self.task.epochs,
            "parameters": parameter_count(self.state.params),
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "versions": {"mpjax": mpjax.__version__, "jax": jax.__version__},
        }
        if is_main():
            self.folder.write_summary(summary)
        return summary


def parameter_count(params: Any) -> int:
    """Numbers in a tree of arrays."""
    return sum(x.size for x in jax.tree.leaves(params))
