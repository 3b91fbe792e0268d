"""The training loop of the scripts: epochs, tests, checkpoints, resuming, and the files of the run folder."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import optax
from tensorboardX import SummaryWriter
from tqdm import tqdm

import mpjax
from examples.common.checkpoints import Checkpoints
from examples.common.cli import UsageError, one_line, process_id, say
from examples.common.config import RunConfig
from examples.common.flags import names_stored
from examples.common.pictures import draw_curves
from examples.common.processes import Agreement, gather, raise_first, together
from examples.common.run_folder import RunFolder, write_json
from examples.common.task import Task
from examples.common.training import means
from perf.environment import versions

# Largest number of consecutive skipped steps that `mpjax.check_progress` accepts.
_MAX_SKIPS = 50


# What a process may ask of all at the next step; the largest number wins.
_SAVE, _SIGNAL, _FAILURE = 1, 100, 1000

ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


class Interruption(contextlib.ExitStack):
    """A context in which the first signal to end asks the loop to stop at the next step.

    Clusters send SIGTERM, or what they are told to before the time is up (SIGUSR1), a closed terminal SIGHUP. A signal
    that the process ignores (SIGHUP, under nohup) stays ignored. A second one has its normal effect, so that a hanging
    run can still be ended. Orbax's `reached_preemption` handles only SIGTERM, and only under `jax.distributed`.

    Attributes:
        signal: The received signal, or None.
    """

    signal: signal.Signals | None = None

    def __enter__(self) -> Interruption:
        # Python allows only the main thread to set signal handlers.
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.callback(signal.signal, number, signal.signal(number, self._handle))
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self.close()


class Interrupted(Exception):
    """A signal ended the run. Its state is saved.

    Attributes:
        output: The folder of the run, to resume from.
        exit_code: The exit code for the process.
    """

    def __init__(self, number: signal.Signals, output: Path, step: int) -> None:
        super().__init__(f"stopped by {number.name} after step {step}")
        self.output, self.exit_code = output, 128 + number  # as shells report it


def open_folder(config: RunConfig, kind: str = "") -> RunFolder:
    """Opens and locks the folder of a new or resumed run.

    Args:
        config: The flags. Without --output, the folder is the next number in the folder `runs/SCRIPT` + `kind`.
        kind: The suffix of the parent folder, such as "-benchmarks".

    Raises:
        UsageError: The folder is not empty or, with --resume, holds no run or another run, or another process uses it.
    """

    def opened() -> RunFolder | None:
        if process_id():
            return None
        if config.resume and config.output is not None:
            return RunFolder.reopen(config.output, config.settings(), names_stored(config, "free", "running"))
        return RunFolder.create(config.output, Path(f"runs/{config.script}{kind}"), config.settings())

    folder = together(opened)  # The first process locks it.
    path, *_ = gather(folder and str(folder.path.absolute()))
    return folder or RunFolder(Path(path))


def train(task: Task, folder: RunFolder) -> dict[str, Any]:
    """Trains to the last epoch and returns the content of summary.json.

    Raises:
        UsageError: Training diverged, the disk is full, or the checkpoint is of another model.
        Interrupted: A signal ended the training. The state is saved.
    """
    with contextlib.ExitStack() as stack:
        return _Run(task, folder, stack).finish()


class _Run:
    """One run, which opens its resources on the stack. `finish` trains."""

    def __init__(self, task: Task, folder: RunFolder, stack: contextlib.ExitStack) -> None:
        self.task, self.config, self.folder, self.stack = task, task.config, folder, stack
        self.interruption = stack.enter_context(Interruption())
        self.checkpoints = stack.enter_context(Checkpoints(folder.checkpoints, self.config.keep, clean=True))
        keep_best = self.config.keep_best and task.best
        self.best = stack.enter_context(Checkpoints(folder.best, 1, clean=True)) if keep_best else None
        stack.callback(task.close)
        self.state: Any = None
        self.lines: list[dict[str, Any]] = []  # of the finished epochs
        self.epoch, self.batch = 0, 0
        self.items, self.seconds = 0, 0.0
        self.saved = time.monotonic()
        self.agreement = Agreement()
        self.failure: str | None = None  # of the data

    def finish(self) -> dict[str, Any]:
        """Trains to the last epoch. Logs each epoch, and saves checkpoints at intervals."""
        task = self.task
        if not (self.config.resume and self._restore()):
            self.state = task.start_state()
        self.folder.begin(self.config.settings(), task.description(), self.lines)
        step = int(self.state.step)  # later events are of an interrupted run: TensorBoard drops them
        if process_id() == 0:
            writer = SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=step + 1 if step else None)
            self.writer = self.stack.enter_context(writer)
        started = time.perf_counter()
        say(task.headline())
        task.compile()
        say(f"compiled in {time.perf_counter() - started:.1f} s; output in {self.folder.path}")
        done, quiet = self.epoch * task.steps + self.batch, not sys.stderr.isatty()
        pace: dict[str, Any] = {"mininterval": 10 if quiet else 0.1, "disable": process_id() > 0, "dynamic_ncols": True}
        self.bar = self.stack.enter_context(tqdm(total=task.epochs * task.steps, initial=done, **pace))
        while self.epoch < task.epochs and not self._patience_exhausted():
            line = self._train_epoch()
            self.lines.append(line)
            self.folder.write_metrics(self.lines)
            self._write_scalars(line, "")
            say(self._epoch_text(line))
            self.epoch, self.batch = self.epoch + 1, 0
            self.state = task.next_epoch(self.state)
            if self.best is not None and self._best_line() is line:
                self._save(self.best)
        self._save()
        return self._summarise(task.final_metrics(self.state, self._save_or_stop))

    def _restore(self) -> bool:
        restored = self.task.restore(self.checkpoints)
        if restored is None:
            say("no checkpoint was saved yet: the run starts from the beginning")
        else:
            self.state, position = restored
            self.epoch, self.batch, self.lines = position["epoch"], position["batch"], position["metrics"]
            if self.best is not None:
                self.best.set_aside_after(int(self.state.step))
        return restored is not None

    def _train_epoch(self) -> dict[str, Any]:
        """Trains to the end of the epoch and returns its line of metrics."""
        self.bar.set_description(f"epoch {self.epoch + 1}/{self.task.epochs}", refresh=False)
        first, started = self.batch, time.perf_counter()
        for batch in self._batches():
            self._save_or_stop()
            self.state, outputs = self.task.training.train_step(self.state, batch)
            self.batch += 1
            self.bar.update()
            step = self.epoch * self.task.steps + self.batch
            if step % self.config.log_every == 0:
                self._log_step(step, outputs)
        jax.block_until_ready(self.state)
        seconds, items = time.perf_counter() - started, (self.batch - first) * self.task.batch_size
        self.items, self.seconds = self.items + items, self.seconds + seconds
        self._check_progress()
        scaling, metrics = self.state.opt_state, self.task.epoch_metrics(self.state, self._save_or_stop)
        return {
            "epoch": self.epoch + 1,
            "step": int(self.state.step),
            **metrics,
            "policy": self.task.policy,
            "loss_scale": float(scaling.loss_scale),
            "skipped_steps": int(scaling.skipped_steps),
            f"{self.task.unit}_per_second": items / seconds,
        }

    def _batches(self) -> Iterator[Any]:
        """The batches of the epoch, each read one step ahead, so that no process starts a step that another can't."""
        source = iter(self.task.batches(self.epoch, self.batch))
        batch = self._read(source)
        if any(gather(self.failure)):
            self._save()  # The data are at fault, not the training, so the state is worth saving.
            raise_first(self.failure)
        while batch is not None:
            ahead = self._read(source)
            yield batch
            batch = ahead
        if self.failure is not None:
            self._save_or_stop()

    def _read(self, source: Iterator[Any]) -> Any:
        try:
            return next(source, None)
        except UsageError as error:
            self.failure = one_line(error)
            return None

    def _log_step(self, step: int, outputs: dict[str, Any]) -> None:
        found = jax.device_get(outputs)
        metrics = means(found["totals"])
        scaling = {name: found[name].item() for name in ("loss_scale", "skipped_steps")}
        self._write_scalars({"step": step, **{f"train_{name}": x for name, x in metrics.items()}, **scaling}, "step/")
        parts = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        shown = f"{parts}, scale {scaling['loss_scale']:g}, skipped {scaling['skipped_steps']}"
        self.bar.set_postfix_str(shown, refresh=False)
        if found["consecutive_skips"] > _MAX_SKIPS:
            self._check_progress()

    def _write_scalars(self, line: dict[str, Any], prefix: str) -> None:
        """Sends the finite numbers of a line to TensorBoard."""
        if process_id():
            return
        for name, value in line.items():
            if name not in ("epoch", "step") and isinstance(value, int | float) and math.isfinite(value):
                self.writer.add_scalar(prefix + name, value, line["step"])
        self.writer.flush()

    def _epoch_text(self, line: dict[str, Any]) -> str:
        known = (*self.task.table, "test_loss")
        shown = [name for name in line if name.removeprefix("dev_").replace("train_", "test_") in known]
        unit, metrics = self.task.unit, "  ".join(f"{name} {line[name]:.4f}" for name in shown)
        speed = f"{line[f'{unit}_per_second']:,.0f} {unit}/s"
        scaling = f"scale {line['loss_scale']:g}  skipped {line['skipped_steps']}"
        return f"epoch {line['epoch']:3d}/{self.task.epochs}  {metrics}  {speed}  {scaling}"

    def _best_line(self) -> dict[str, Any] | None:
        name, sign = self.task.metric
        lines = [line for line in self.lines if math.isfinite(line.get(name, math.nan))]
        # The first of equal epochs: `max` keeps it.
        return max(lines, key=lambda line: sign * line[name], default=None)

    def _patience_exhausted(self) -> bool:
        """Whether --patience is exhausted."""
        best, patience = self._best_line(), self.config.patience
        if patience is None or best is None or self.epoch - best["epoch"] < patience:
            return False
        name, _ = self.task.metric
        say(f"stopped early: no improvement on {name} {best[name]:.4g} of epoch {best['epoch']} in {patience} epochs")
        return True

    def _save_or_stop(self) -> None:
        """Called between steps. Saves a checkpoint if one is due, and raises `Interrupted` after a signal.

        All processes do so at the same step, whichever has received the signal, or can't read its data.
        """
        wanted = 0
        if process_id() == 0 and time.monotonic() - self.saved > self.config.save_every:
            wanted, self.saved = _SAVE, time.monotonic()
        if self.interruption.signal is not None:
            wanted = _SIGNAL + self.interruption.signal
        decided = self.agreement(wanted if self.failure is None else _FAILURE)
        if decided:
            self._save()
        if decided == _FAILURE:
            raise_first(self.failure)
        if decided > _SIGNAL:
            raise Interrupted(signal.Signals(decided - _SIGNAL), self.folder.path, int(self.state.step))

    def _check_progress(self) -> None:
        scaling = self.state.opt_state
        skipped = int(scaling.consecutive_skips)
        falls = {None: mpjax.get_policy(self.config.policy).compute_dtype == "float16", "dynamic": True}
        if skipped >= self.task.steps and not falls.get(self.config.loss_scale):
            scale = float(scaling.loss_scale)
            remedy = "Give a smaller --loss-scale, or dynamic." if scale > 1 else "Give a lower --learning-rate."
            why = f"gradients are inf or NaN at the fixed loss scale {scale:g}. {remedy}"
            raise UsageError(f"all {self.task.steps} steps of epoch {self.epoch + 1} were skipped: {why}")
        try:
            mpjax.check_progress(scaling, _MAX_SKIPS)
        except mpjax.LossScaleError as error:
            other = "" if self.task.policy == "float32" else ", or --policy float32"
            remedy = f"A lower --learning-rate may help{other}."
            raise UsageError(f"training diverged in epoch {self.epoch + 1}: {error} {remedy}") from error

    def _save(self, best: Checkpoints | None = None) -> None:
        position = {"epoch": self.epoch, "batch": self.batch, "metrics": [*self.lines], **self.task.position()}
        (best or self.checkpoints).save(int(self.state.step), self.state, position)

    def _summarise(self, final: dict[str, Any]) -> dict[str, Any]:
        last, speed, best = self.lines[-1], f"{self.task.unit}_per_second", self._best_line()
        if last["skipped_steps"] == last["step"]:
            say("every step was skipped while the loss scale decreased: nothing was trained; give more --epochs")
        summary = {
            "policy": self.task.policy,
            **{n: x for n, x in last.items() if n.startswith(("train_", "test_", "dev_")) or n in self.task.table},
            **{name: getattr(self.config, name) for name in ("amp", "seed", "batch_size", "learning_rate")},
            **self.task.facts(),
            **final,
            speed: self.items / self.seconds if self.seconds else last[speed],
            **{name: last[name] for name in ("loss_scale", "skipped_steps")},
            "trained": last["skipped_steps"] < last["step"],
            "epochs": last["epoch"],
            "best_epoch": best and best["epoch"],
            "parameters": optax.tree.size(self.state.params),
            "device": jax.devices()[0].device_kind,
            "devices": self.task.parallel.count,
            "versions": versions(),
        }
        draw_curves(self.lines, self.folder.path / "curves.png")
        write_json(self.folder.path / "summary.json", summary)  # the run counts as finished
        return summary
