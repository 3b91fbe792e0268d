"""The benchmark modes: one policy in detail, several as a table, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from examples.common.benchmarking import (
    Case,
    DoesNotFit,
    compare,
    comparison_table,
    compile_step,
    measure,
    plot_comparison,
)
from examples.common.devices import DataParallel
from examples.common.hosts import is_main, say
from examples.common.loop import open_folder, parameter_count
from examples.common.run_folder import RunFolder, write_json
from examples.imagenet.config import Config
from examples.imagenet.data import Batch, Dataset
from examples.imagenet.pipeline import train_batches
from examples.imagenet.synthetic import Synthetic, random_batch
from examples.imagenet.task import ImageTask, open_data
from perf.environment import environment
from perf.memory import is_out_of_memory, largest_batch, memory_limit

BENCHMARKS = Path("runs/imagenet-benchmarks")

_WARMUP_ROUNDS = 3  # of the comparison, whose steps have been compiled and run once by then


class Bench:
    """A task with a state and a batch on the devices, and the step that the mode measures."""

    def __init__(self, config: Config, data: tuple[Dataset, Dataset], parallel: DataParallel) -> None:
        self.task = task = ImageTask(config, *data, parallel)
        self.training = config.mode != "inference_benchmark"
        self._compiled = self._compile()
        state = task.initial_state()
        self.parameters = parameter_count(state.params)
        self.state: Any = state if self.training else task.training.weights(state)
        self.batch = parallel.put(random_batch(task.train_set, task.batch_size // jax.process_count()))

    @property
    def compile_seconds(self) -> float:
        return self._compiled.seconds

    @property
    def program_bytes(self) -> int:
        return self._compiled.bytes

    def step(self, state: Any, batch: Batch) -> tuple[Any, Any]:
        """The next state, and what says that the step is done."""
        if self.training:
            return self._compiled.call(state, batch)
        return state, self._compiled.call(state, batch.images)

    def run(self) -> Any:
        """A step on the same batch again."""
        self.state, shown = self.step(self.state, self.batch)
        return shown

    def _compile(self) -> Any:
        task, state = self.task, self.task.abstract_state()
        batch = task.abstract_batch(task.batch_size)
        if self.training:
            return compile_step(task.training.train_step, state, batch)
        weights = task.parallel.like_state(jax.eval_shape(task.training.weights, state))
        return compile_step(task.training.predict_step, weights, batch.images)


def run_benchmark(config: Config) -> dict[str, Any]:
    """Measures one policy, on `--data-dir` or on made-up images, and writes benchmark.json."""
    data, parallel = _data(config), DataParallel(config.devices)
    folder = _folder(config)
    bench = Bench(config, data, parallel)
    task = bench.task
    iterations = config.num_iter * (task.steps if config.iter_unit == "epoch" else 1)
    measured = functools.partial(
        measure,
        bench.step,
        warmup=config.warmup_steps,
        iterations=iterations,
        items=task.batch_size,
        unit="images",
        one_by_one=not bench.training,
    )
    batches: Iterator[Batch] = itertools.repeat(bench.batch)
    results: dict[str, Any] = {}
    if config.data_dir is not None:
        # The model alone first: what the same steps take longer from files is the input pipeline.
        bench.state, alone = measured(bench.state, batches)
        with train_batches(task.train_set, task.batch_size, config.seed, **task.loading()) as batches:
            bench.state, results = measured(bench.state, batches)
        results["model_milliseconds"] = alone["latency_milliseconds"]["avg"]
        share = 1 - alone["latency_milliseconds"]["avg"] / results["latency_milliseconds"]["avg"]
        results["input_share"] = max(0.0, share)  # of two measurements, neither of which is exact
    else:
        bench.state, results = measured(bench.state, batches)
    results = {
        "mode": config.mode,
        "policy": config.policy,
        "amp": config.amp,
        "model": config.model_name,
        "parameters": bench.parameters,
        "data": task.train_set.name,
        "image_shape": task.train_set.image_shape,
        "batch_size": task.batch_size,
        "devices": parallel.count,
        "warmup_steps": config.warmup_steps,
        "iterations": iterations,
        "compile_seconds": bench.compile_seconds,
        "program_bytes": bench.program_bytes,
        **results,
        "environment": environment(),
    }
    _write(folder, "benchmark.json", results)
    latency = ", ".join(f"{name} {value:.1f}" for name, value in results["latency_milliseconds"].items())
    say(f"latency in ms: {latency}; compiled in {bench.compile_seconds:.1f} s; output in {folder.path}")
    return results


def run_comparison(config: Config, accuracies: dict[str, float]) -> dict[str, Any]:
    """Measures every policy of `--compare` at every batch size, in turns, and leaves the table in three forms.

    Args:
        config: the flags.
        accuracies: of the policies that were trained before, for the table.
    """
    data, parallel = _data(config), DataParallel(config.devices)
    folder = RunFolder(config.output) if accuracies and config.output else _folder(config)
    limit, _ = memory_limit(config.memory_limit)
    sizes = [config.preset.batch_size]
    if config.batch_sizes is not None:
        sizes = [int(size) for size in config.batch_sizes.split(",")]

    def cases() -> Iterator[Case | DoesNotFit]:
        for size, policy in itertools.product(sizes, config.policies):
            own = dataclasses.replace(config, policy=policy, batch_size=size, compare=None)
            yield _case(own, data, parallel, limit)

    rows = compare(cases(), config.num_iter, _WARMUP_ROUNDS)
    for row in rows:
        if row["policy"] in accuracies:
            row["test_accuracy"] = accuracies[row["policy"]]
    text = comparison_table(rows, "images", {"test accuracy": "test_accuracy"} if accuracies else None)
    results = {
        "mode": config.mode,
        "model": config.model_name,
        "image_shape": data[0].image_shape,
        "rounds": config.num_iter,
        "rows": rows,
        "environment": environment(),
    }
    _write(folder, "comparison.json", results)
    if is_main():
        (folder.path / "comparison.md").write_text(text + "\n")
        title = f"{config.model_name}, {config.side}x{config.side}, on {jax.devices()[0].device_kind}"
        plot_comparison(folder.path / "comparison.png", rows, title)
    say(f"{text}\noutput in {folder.path}")
    return results


def find_batch_sizes(config: Config) -> dict[str, Any]:
    """The largest batch that fits, for each policy: by the compiled program, and by a try where there is a device."""
    data, parallel = _data(config), DataParallel(config.devices)
    folder = _folder(config)
    limit, source = memory_limit(config.memory_limit)
    say(f"memory: {limit / 2**30:.1f} GiB ({source})")
    found: dict[str, int | None] = {}
    sizes = [parallel.count * 2**k for k in range((len(data[0]) // parallel.count).bit_length())]
    for policy in config.policies:

        def own(size: int, policy: str = policy) -> Config:
            return dataclasses.replace(config, policy=policy, batch_size=size, compare=None)

        def bytes_needed(size: int, own: Callable[[int], Config] = own) -> int:
            task = ImageTask(own(size), *data, parallel)
            # Sharded arrays are counted on one device, which is where they must fit.
            step = compile_step(task.training.train_step, task.abstract_state(), task.abstract_batch(size))
            # A program that fits by its plan may still find the memory in pieces.
            runs = jax.default_backend() == "cpu" or step.bytes > limit or _runs(own(size), data, parallel, limit)
            return step.bytes if runs else limit + 1

        size = largest_batch(sizes, bytes_needed, limit)
        found[policy] = size
        say(f"{policy}: " + (f"batch size {size}" if size else "not even the smallest batch fits"))
    checked = "compiled" if jax.default_backend() == "cpu" else "compiled and run"
    results = {"largest_batch_size": found, "memory_bytes": limit, "memory": source, "checked": checked}
    say(f"the programs were {checked}; output in {folder.path}")
    _write(folder, "batch_sizes.json", results | {"model": config.model_name, "environment": environment()})
    return results


def _runs(config: Config, data: tuple[Dataset, Dataset], parallel: DataParallel, limit: int) -> bool:
    return isinstance(_case(config, data, parallel, limit), Case)


def _case(config: Config, data: tuple[Dataset, Dataset], parallel: DataParallel, limit: int) -> Case | DoesNotFit:
    """The policy and batch size of the flags, their step run once; or that it does not fit."""
    policy, size = config.policy, config.preset.batch_size
    try:
        bench = Bench(config, data, parallel)
        if bench.program_bytes > limit:
            return DoesNotFit(policy, size)
        jax.block_until_ready(bench.run())
    except Exception as error:
        if is_out_of_memory(error):
            return DoesNotFit(policy, size)
        raise
    return Case(policy, size, bench.run, bench.compile_seconds, bench.program_bytes)


def _data(config: Config) -> tuple[Dataset, Dataset]:
    if config.data_dir is None and config.is_benchmark:
        made_up = Synthetic(config.model_name, config.side)
        return made_up, made_up
    return open_data(config)


def _folder(config: Config) -> RunFolder:
    return open_folder(config.output, BENCHMARKS, config.settings(), resume=False)


def _write(folder: RunFolder, name: str, results: dict[str, Any]) -> None:
    if is_main():
        write_json(folder.path / name, results)
