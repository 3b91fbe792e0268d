"""The benchmark modes of all scripts: one policy in detail, several as a table, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
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
from examples.common.config import RunConfig
from examples.common.hosts import is_main, say
from examples.common.loop import open_folder, parameter_count
from examples.common.run_folder import RunFolder, write_json
from examples.common.task import Task
from perf.environment import environment
from perf.memory import is_out_of_memory, largest_batch, memory_limit

MakeTask = Callable[[Any], Task]

_WARMUP_ROUNDS = 3  # of a comparison, whose steps are already compiled and have run once


class Bench:
    """A task with its state and a batch on the devices, and the step that the mode measures."""

    def __init__(self, task: Task) -> None:
        self.task, self.training = task, task.config.mode != "inference_benchmark"
        state = task.initial_state()
        self.parameters = parameter_count(state.params)
        self.state: Any = state if self.training else task.training.weights(state)
        self.batch = task.parallel.put(task.synthetic_batch())
        step = task.training.train_step if self.training else task.inference_step()
        self.compiled = compile_step(step, self.state, self.batch)

    def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The next state, and an output that is ready when the step is done."""
        result = self.compiled.call(state, batch)
        return result if self.training else (state, result)

    def run(self) -> Any:
        """Runs a step on the same batch."""
        self.state, outputs = self.step(self.state, self.batch)
        return outputs


def run_benchmark(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Measures one policy on files, if given, or on synthetic data, and writes benchmark.json."""
    task = make(config)
    with open_folder(config, "-benchmarks") as folder:
        bench = Bench(task)
        epochs = getattr(config, "iter_unit", "batch") == "epoch"
        iterations = config.num_iter * (task.steps if epochs else 1)
        measured = functools.partial(
            measure,
            bench.step,
            warmup=config.warmup_steps,
            iterations=iterations,
            items=task.batch_size,
            unit=task.unit,
            one_by_one=not bench.training,
        )
        bench.state, results = measured(bench.state, itertools.repeat(bench.batch))
        if task.from_files:
            # The extra time of the same steps from files is that of the input pipeline.
            alone = results["latency_milliseconds"]["avg"]
            try:
                bench.state, results = measured(bench.state, map(task.put, task.endless_batches()))
            finally:
                task.close()
            share = 1 - alone / results["latency_milliseconds"]["avg"]
            # Both measurements have noise, so the difference may be negative.
            results |= {"model_milliseconds": alone, "input_share": max(0.0, share)}
        results = {
            "mode": config.mode,
            "policy": config.policy,
            "amp": config.amp,
            "parameters": bench.parameters,
            **task.benchmark_settings(),
            "batch_size": task.batch_size,
            "devices": task.parallel.count,
            "warmup_steps": config.warmup_steps,
            "iterations": iterations,
            "compile_seconds": bench.compiled.seconds,
            "program_bytes": bench.compiled.bytes,
            **results,
            **task.benchmark_metrics(results[f"{task.unit}_per_second"]),
            "environment": environment(),
        }
        _write(folder, "benchmark.json", results)
    latency = ", ".join(f"{name} {value:.1f}" for name, value in results["latency_milliseconds"].items())
    say(f"latency in ms: {latency}; compiled in {bench.compiled.seconds:.1f} s; output in {folder.path}")
    return results


def run_comparison(
    config: RunConfig,
    make: MakeTask,
    folder: RunFolder,
    metrics: Mapping[tuple[str, int], Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Measures the policies of --compare interleaved at each batch size. Writes the table as JSON, Markdown and PNG.

    Args:
        config: The flags.
        make: Makes a task from flags.
        folder: The output folder.
        metrics: Metrics by policy and batch size, from earlier trainings, for the table.
    """
    limit, _ = memory_limit(config.memory_limit)
    # Settings that all tasks share are taken from the first.
    first = make(_config_of(config, config.policies[0], config.sizes[0]))
    tested = config.mode != "train"
    heads = (
        {head: key if tested else key.replace("test_", "train_") for key, head in first.table.items()}
        if metrics
        else {}
    )
    tasks: dict[int, Task] = {}

    def cases() -> Iterator[Case | DoesNotFit]:
        for size, policy in itertools.product(config.sizes, config.policies):
            task = make(_config_of(config, policy, size))
            tasks[size] = task
            yield _try_case(task, limit)

    rows = compare(cases(), config.num_iter, _WARMUP_ROUNDS)
    for row in rows:
        found = (metrics or {}).get((row["policy"], row["batch_size"]), {})
        row |= {key: found[key] for key in heads.values() if key in found}
        if "items_per_second" in row:
            row |= tasks[row["batch_size"]].benchmark_metrics(row["items_per_second"])
    text = comparison_table(rows, first.unit, heads)
    settings = first.benchmark_settings()
    results = {
        "mode": config.mode,
        **settings,
        "rounds": config.num_iter,
        "rows": rows,
        "environment": environment(),
    }
    _write(folder, "comparison.json", results)
    if is_main():
        (folder.path / "comparison.md").write_text(text + "\n")
        title = f"{first.title.split(', policy')[0]}, {config.mode} on {jax.devices()[0].device_kind}"
        plot_comparison(folder.path / "comparison.png", rows, title)
    say(f"{text}\noutput in {folder.path}")
    return results


def find_batch_sizes(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Finds the largest batch that fits for each policy by compiling the step and, except on CPUs, running it."""
    with open_folder(config, "-benchmarks") as folder:
        limit, source = memory_limit(config.memory_limit)
        say(f"memory: {limit / 2**30:.1f} GiB ({source})")
        found: dict[str, int | None] = {}
        for policy in config.policies:
            task = make(_config_of(config, policy, config.preset.batch_size))
            count = task.parallel.count
            size = largest_batch(range(count, task.max_batch_size + 1, count), task.bytes_needed, limit)
            while size and jax.default_backend() != "cpu":
                # A program that fits according to the compiler may still fail because of fragmented memory.
                if isinstance(_try_case(make(_config_of(config, policy, size)), limit), Case):
                    break
                size = size * 63 // 64 // count * count
            found[policy] = size or None
            say(f"{policy}: " + (f"batch size {size}" if size else "not even the smallest batch fits"))
        checked = "compiled" if jax.default_backend() == "cpu" else "compiled and run"
        results = {"largest_batch_size": found, "memory_bytes": limit, "memory": source, "checked": checked}
        say(f"the programs were {checked}; output in {folder.path}")
        _write(folder, "batch_sizes.json", results | task.benchmark_settings() | {"environment": environment()})
    return results


def _config_of(config: RunConfig, policy: str, size: int) -> Any:
    return dataclasses.replace(config, policy=policy, batch_size=size, compare=None, batch_sizes=None)


def _try_case(task: Task, limit: int) -> Case | DoesNotFit:
    """Compiles a task's step and runs it once. Returns `DoesNotFit` if memory is exhausted."""
    try:
        bench = Bench(task)
        if bench.compiled.bytes > limit:
            return DoesNotFit(task.policy, task.batch_size)
        jax.block_until_ready(bench.run())
    except Exception as error:
        if is_out_of_memory(error):
            return DoesNotFit(task.policy, task.batch_size)
        raise
    return Case(task.policy, task.batch_size, bench.run, bench.compiled.seconds, bench.compiled.bytes)


def _write(folder: RunFolder, name: str, results: dict[str, Any]) -> None:
    if is_main():
        write_json(folder.path / name, results)
