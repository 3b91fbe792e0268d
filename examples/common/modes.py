"""Runs the mode that the flags of a script choose."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mpjax
from examples.common.benchmarks import find_batch_sizes, run_benchmark, run_comparison
from examples.common.config import INSPECT, RunConfig
from examples.common.devices import DataParallel
from examples.common.hosts import connect, is_main, say
from examples.common.loop import Interrupted, open_folder, train
from examples.common.task import Task, shape_of
from examples.common.use import evaluate, export, open_model, run_variables

MakeTask = Callable[[Any], Task]

_PROFILED = 10  # steps of --profile


def run(config: RunConfig, kind: type[Task]) -> dict[str, Any]:
    """Runs the action of the flags and returns the content of its result file, such as summary.json.

    Args:
        config: The flags.
        kind: The script's task.

    Raises:
        UsageError: The data or the flags are invalid.
        Interrupted: A signal ended the training. The state is saved.
    """
    connect(config.coordinator, config.processes, config.process_id)
    if config.action == "evaluate":
        return evaluate(config, kind)
    if config.action == "predict":
        task, variables = open_model(config, kind)
        return task.predict(variables)
    make = task_maker(config, kind)
    if config.action in INSPECT:
        return inspect(config, make)
    if config.action == "find_batch_size":
        return find_batch_sizes(config, make)
    if config.is_benchmark:
        if not config.compare:
            return run_benchmark(config, make)
        with open_folder(config, "-benchmarks") as folder:
            return run_comparison(config, make, folder)
    if config.compare:
        timed = task_maker(config, kind, kind.timing_data(make.keywords["data"]))
        return train_and_compare(config, make, timed)
    return run_training(config, make)


def task_maker(config: RunConfig, kind: type[Task], data: Any = None) -> partial[Task]:
    """A function from flags to tasks on the same data, which are opened once, and the same devices."""
    parallel = DataParallel(config.devices, config.fsdp)
    return partial(kind, parallel=parallel, data=kind.open(config) if data is None else data)


def run_training(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Trains in a new folder, or resumes an earlier run."""
    task = make(config)
    with open_folder(config) as folder:
        summary = folder.summary if config.resume and config.resume_step is None else None
        if summary is not None and summary.get("epochs", 0) >= task.epochs:
            say(f"the run in {folder.path} has already finished")
        else:
            summary = train(task, folder)
            task.report(folder.path)
        if config.export is not None:
            summary |= export(task, run_variables(task, folder), folder.path, config.export)
            if is_main():
                folder.write_summary(summary)
    return summary


def inspect(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Prints the precision or the time of each operation of a training step, with --output also as an HTML page."""
    task = make(config)
    step, batch = task.training.train_step, task.example_batches(task.batch_size)[-1]
    if config.audit:
        _report(mpjax.audit(step, task.abstract_state(), task.parallel.like_batch(batch)), config.output, "audit.html")
    if config.profile:
        try:
            same_shape = (other for other in task.endless_batches() if shape_of(other) == shape_of(batch))
            batches = map(task.put, same_shape)
            report = mpjax.profile(step, task.initial_state(), steps=_PROFILED, batches=batches)
            _report(report, config.output, "profile.html")
        finally:
            task.close()
    return {}


def _report(report: Any, folder: Path | None, name: str) -> None:
    say(str(report))
    if folder is not None and is_main():
        folder.mkdir(parents=True, exist_ok=True)
        report.to_html(folder / name)
        say(f"written to {folder / name}")


def train_and_compare(config: RunConfig, make: MakeTask, timed: MakeTask) -> dict[str, Any]:
    """Trains each policy of --compare at each batch size in a subfolder of --output, then measures them."""
    with open_folder(config) as folder:
        metrics: dict[tuple[str, int], dict[str, Any]] = {}
        for size, policy in itertools.product(config.sizes, config.policies):
            name = policy.replace("/", "_") + (f"-batch{size}" if config.batch_sizes else "")
            output = folder.path / name
            resume = config.resume and (output / "config.json").exists()
            changed: Any = {"policy": policy, "batch_size": size, "output": output, "resume": resume}
            single = dataclasses.replace(config, compare=None, batch_sizes=None, **changed)
            try:
                summary = run_training(single, make)
            except Interrupted as interrupted:
                # The comparison is resumed, not this one training.
                interrupted.output = folder.path
                raise
            metrics[policy, size] = {name: value for name, value in summary.items() if isinstance(value, float)}
        return run_comparison(dataclasses.replace(config, output=folder.path), timed, folder, metrics)
