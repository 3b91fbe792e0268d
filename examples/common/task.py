"""The class `Task`. A script describes its model and data; `Task` handles precision, devices and checkpoints."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from examples.common import training
from examples.common.checkpoints import Checkpoints, Restored
from examples.common.cli import SkippedFiles, UsageError, say
from examples.common.config import BUILD, RunConfig
from examples.common.flags import names_stored
from examples.common.loading import Loading
from examples.common.processes import gather
from examples.common.run_folder import RunFolder, check_identity
from examples.common.training import DataParallel, Model, Training, TrainState, Variables
from examples.common.weights import Arrays, named, open_arrays

Program = tuple[jax.stages.Wrapped, tuple[Any, ...]]  # a jitted function, and abstract arguments


class Task(abc.ABC):
    """A model with its data, on all devices.

    A script implements the abstract methods. `examples.custom` is a short example.

    Args:
        config: The flags.
        parallel: The devices.
        data: The result of `open`.

    Attributes:
        config_type: The class of the flags.
        unit: What an item of a batch is, in the plural, such as "images".
        metric: The metric that compares epochs, with 1 if higher is better and -1 if lower is better.
        metric_name: Name of the metric for users.
        table: The metrics of tables and of the last line, with their names for users.
        title: The model and its data.
        steps: Number of steps of an epoch.
        test_count: Number of entries of the test set.
        sets: The sets of the data that are open, by name, with `identity`, `skipped` and a length.
    """

    config_type: ClassVar[type[RunConfig]]
    unit: ClassVar[str]
    metric: tuple[str, int]
    metric_name: ClassVar[str]
    table: ClassVar[Mapping[str, str]]
    title: str
    steps = 1
    test_count: int
    sets: Mapping[str, Any] = {}
    # Only the modes predict, training_benchmark and inference_benchmark need these.
    predict: Any  # (Variables) -> the results
    synthetic_batch: Any  # () -> a batch shaped as the largest of `example_batches`
    inference_step: Any  # () -> a jitted function (Variables, batch) -> predictions
    benchmark_facts: Any  # (items per second) -> settings and further figures for benchmark.json

    def __init__(self, config: Any, parallel: DataParallel, data: Any) -> None:
        self.config, self.parallel, self.data = config, parallel, data
        self.policy, self.epochs, self.batch_size = config.policy, config.epochs, config.batch_size
        if config.action in BUILD:  # A test pads its batches.
            parallel.check(self.batch_size)

    # Defined by each script.

    @classmethod
    @abc.abstractmethod
    def open(cls, config: Any, description: dict[str, Any] | None = None) -> Any:
        """Opens the data of the flags, once for all tasks. A trained model's `description` is given to use it."""

    @abc.abstractmethod
    def model(self) -> Model:
        """The network and its loss in the precision of the flags."""

    @abc.abstractmethod
    def example_batches(self) -> Sequence[Any]:
        """A global batch of each shape that a step is compiled for, the largest last."""

    @abc.abstractmethod
    def batches(self, epoch: int, first: int) -> Iterator[Any]:
        """The training batches of an epoch from index `first`, the same in every run, on their devices."""

    @abc.abstractmethod
    def test(self, weights: Variables, between_steps: Callable[[], None], *, last: bool = True) -> dict[str, Any]:
        """Test metrics. Call `between_steps` before each step. `last` is whether training has ended."""

    def test_programs(self, weights: Variables) -> list[Program]:
        """The programs of `test` for abstract weights, to compile before a training."""
        return []

    def description(self) -> dict[str, Any]:
        """The facts about the data that the model needs, as JSON. With the flags, they suffice to use the model."""
        return {}

    def identity(self) -> dict[str, Any]:
        """What a resumed run must find again, as JSON: digests of its data by name, and the order of the outputs."""
        return {}

    def final_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        """Metrics of the summary that are measured only when training has ended."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Entries of summary.json about the model and the data."""
        return {f"{name}_{self.unit}": len(data) for name, data in self.sets.items()}

    def report(self, folder: Path | None) -> None:  # noqa: B027 - most have none
        """Reports a test in words, in a run's folder after a training."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Releases the resources of the run."""

    # Shared by all scripts.

    @property
    def skipped(self) -> Mapping[str, SkippedFiles]:
        """The unusable files of each set that has files."""
        return {name: data.skipped for name, data in self.sets.items() if data.skipped is not None}

    def steps_of(self, name: str, count: int) -> int:
        """The steps of an epoch; raises `UsageError` if there are none, since incomplete batches are dropped."""
        if self.batch_size > count:
            few = f"{name} has {count} training {self.unit}. Give at most {count}."
            raise UsageError(f"--batch-size {self.batch_size} is larger than the data: {few}")
        return count // self.batch_size

    @property
    def best(self) -> tuple[str, int] | None:
        """`metric`; None if the mode has no tests."""
        return None if self.config.mode == "train" else self.metric

    def with_flags(self, **flags: Any) -> Any:
        """Returns a task with the same data and these flags instead of its own."""
        return type(self)(dataclasses.replace(self.config, **flags), self.parallel, self.data)

    def headline(self) -> str:
        """One line with the model, the policy, the data and the devices."""
        facts = [f"{name.replace('_', ' ')} {x:,}" for name, x in self.facts().items() if isinstance(x, int) and x]
        return ", ".join([self.title, *facts, f"on {self.parallel.count} x {jax.devices()[0].device_kind}"])

    @functools.cached_property
    def training(self) -> Training:
        """The set-up for the flags, built at first use."""
        return training.create_training(self.model(), self.config, self.steps, self.parallel)

    @property
    def loading(self) -> Loading:
        """How batches are loaded."""
        return Loading(self.config.workers or os.cpu_count() or 1, self.parallel.put_own, self.parallel.own)

    def initial_state(self) -> TrainState:
        return self.training.init(self.config.seed)

    def abstract_state(self) -> Any:
        """Shapes, dtypes and shardings of the state."""
        return self.parallel.like_state(jax.eval_shape(self.training.init, 0))

    def compile(self) -> None:
        """Compiles the programs of a training at the same time, before it starts. `jit` keeps them."""
        state = self.abstract_state()
        batches = map(self.parallel.like_batch, self.example_batches())
        programs: list[Program] = [(self.training.train_step, (state, batch)) for batch in batches]
        if self.best is not None:
            weights = jax.eval_shape(self.training.weights, state)
            programs += self.test_programs(self.parallel.like_state(weights))
        with ThreadPoolExecutor() as executor:
            list(executor.map(lambda program: program[0].lower(*program[1]).compile(), programs))

    def epoch_metrics(self, state: TrainState, between_steps: Callable[[], None]) -> dict[str, Any]:
        """Training and test metrics after an epoch."""
        line = {f"train_{name}": value for name, value in training.means(state.totals).items()}
        if self.config.mode != "train":
            last = int(state.step) >= self.steps * self.epochs
            line |= self.test(self.training.weights(state), between_steps, last=last)
        updates = int(state.step) // self.config.accumulate
        return line | {"learning_rate": float(self.training.learning_rate(updates))}

    def next_epoch(self, state: TrainState) -> TrainState:
        """The initial state of an epoch, with sums of zero."""
        return state._replace(totals=self.parallel.replicate(training.zeros(state.totals)))

    def position(self) -> dict[str, Any]:
        """Further entries of a checkpoint's position, as JSON: all that a run knows about itself."""
        for part in gather({name: sorted(files.reasons) for name, files in self.skipped.items()}):
            self._count_skipped(part)  # Each process has met those of its rows.
        skipped = {name: sorted(files.reasons) for name, files in self.skipped.items()}
        known = {"settings": self.config.settings(), "description": self.description(), "identity": self.identity()}
        return {"precision": self.config.precision, "skipped": skipped, **known}

    def restore_as_saved(self, checkpoints: Checkpoints, *, resume: bool = False) -> Restored | None:
        """Restores the newest state in the precision that it was trained in."""

        def like(position: dict[str, Any]) -> Any:
            precision = position["precision"]
            return (self if precision == self.config.precision else self.with_flags(**precision)).abstract_state()

        return checkpoints.restore(like, resume=resume)

    def restore(self, checkpoints: Checkpoints) -> Restored | None:
        """Restores the newest state in the precision of the flags, to continue training."""
        restored = self.restore_as_saved(checkpoints, resume=True)
        if restored is None:
            return None
        state, position = restored
        self.check_identity(position)
        self._count_skipped(position["skipped"])
        if position["precision"] == self.config.precision:
            return restored
        state = training.change_precision(state, self.initial_state(), self.training.policy)
        before = position["precision"]["policy"]
        starts = f"the loss scale starts at {float(state.opt_state.loss_scale):g}, the count of skipped steps continues"
        kept = "parameters, statistics and the optimizer's state carry over"
        say(f"from policy {before} to {self.policy}: {kept}; {starts}")
        return self.parallel.place(state), position

    def _count_skipped(self, names: Mapping[str, Sequence[str]]) -> None:
        for name, files in self.skipped.items():
            for path in names.get(name, ()):
                files.reasons.setdefault(path, "before")

    def check_identity(self, position: dict[str, Any]) -> None:
        """Raises a `UsageError` if a checkpoint is of other data or other outputs."""
        check_identity(position.get("identity", {}), json.loads(json.dumps(self.identity())))

    def start_state(self) -> TrainState:
        """The initial state of a training: random, or from --init-from."""
        state, source = self.initial_state(), self.config.init_from
        if source is None:
            return state
        like = Variables(training.float32_params(state), state.stats)
        if source.is_dir():
            other = RunFolder(source)
            settings = other.settings(self.config.script, "--init-from")
            same = {"model"} if settings.get("model") == getattr(self.config, "model", None) else set()
            values = self.config.like(settings, source, same, names_stored(self.config, "running"))
            trained = self.with_flags(**values).run_variables(other, "--init-from")
            arrays = named(self.parallel.get(trained)._asdict())
            shapes = {name: x.shape for name, x in arrays.items()}
            variables = Arrays(f"--init-from {str(source)!r}", shapes, arrays.__getitem__).variables(like)
        else:
            variables = self.read_initial(source, like)
        variables = self.parallel.replicate(variables)
        new = training.with_params(state, variables.params, self.training.policy, training.inner_state(state))
        new = new._replace(stats=variables.stats)
        if state.ema:
            new = new._replace(ema=jax.tree.map(jnp.array, variables._asdict()))
        say(f"weights from {source}")
        return self.parallel.place(new)

    def read_initial(self, path: Path, like: Variables) -> Variables:
        """Reads float32 variables from a file of weights."""
        return open_arrays(path, "--init-from").variables(like)

    def run_variables(self, folder: RunFolder, flag: str = "--output") -> Variables:
        """The float32 variables of a run's checkpoint: the moving average if there is one."""
        path = folder.best if self.config.best else folder.checkpoints
        if not path.is_dir():
            raise UsageError(f"{flag} {str(folder.path)!r} holds no {path.name}; give the folder of a training.")
        with Checkpoints(path) as checkpoints:
            restored = self.restore_as_saved(checkpoints)
        if restored is None:
            raise UsageError(f"{flag} {str(folder.path)!r} holds no checkpoint yet: the run ended before its first.")
        state, _ = restored
        return Variables(**state.ema) if state.ema else Variables(training.float32_params(state), state.stats)
