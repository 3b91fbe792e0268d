"""The benchmark modes of all scripts: one policy in detail, or several as a table."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from examples.common.cli import markdown_table
from examples.common.config import RunConfig
from examples.common.devices import say
from examples.common.loop import open_folder, parameter_count
from examples.common.run_folder import RunFolder, write_json
from examples.common.task import Task
from examples.common.training import compile_step
from perf.environment import environment
from perf.memory import is_out_of_memory, peak_bytes
from perf.timing import interleaved

MakeTask = Callable[[Any], Task]

_WARMUP_ROUNDS = 3  # of a comparison, whose steps are already compiled and have run once


class Bench:
    """A task with its state and a batch on the devices, and the step that the mode measures."""

    def __init__(self, task: Task) -> None:
        self.training = task.config.mode != "inference_benchmark"
        state = task.initial_state()
        self.parameters = parameter_count(state.params)
        self.state: Any = state if self.training else task.training.weights(state)
        self.batch = task.parallel.put(task.synthetic_batch())
        step = task.training.train_step if self.training else task.inference_step()
        self.compiled = compile_step(step, self.state, self.batch)

    def run(self) -> Any:
        """Dispatches a step and returns an output that is ready when it is done."""
        result = self.compiled.call(self.state, self.batch)
        if not self.training:
            return result
        self.state, outputs = result
        return outputs


def measure(
    step: Callable[[], Any], *, warmup: int, iterations: int, items: int, unit: str, one_by_one: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Runs a step `warmup + iterations` times and measures the last `iterations`.

    Args:
        step: Dispatches a step and returns an output that is ready when the step is done.
        items: Number of items in a batch.
        unit: What an item is, in the plural.
        one_by_one: Whether to wait for each step before dispatching the next, as a server does that answers
            requests one by one. Otherwise one step is always queued, as in training, and the latency is the
            time between the ends of two steps.

    Returns:
        The last output, and a JSON object with the speed, latencies in milliseconds, and memory.
    """
    before, ends = None, [time.perf_counter()]
    for index in range(warmup + iterations):
        shown = step()
        if one_by_one or index:
            # Wait for the previous step, so that the device always has another one queued.
            jax.block_until_ready(shown if one_by_one else before)
            ends.append(time.perf_counter())
        before = shown
    jax.block_until_ready(before)
    if not one_by_one:
        ends.append(time.perf_counter())
    seconds = np.diff(ends[warmup:])
    percentiles = {f"p{q}": float(np.percentile(seconds, q)) * 1e3 for q in (50, 90, 95, 99)}
    return before, {
        f"{unit}_per_second": items * iterations / float(seconds.sum()),
        "latency_milliseconds": {"avg": float(seconds.mean()) * 1e3, **percentiles},
        "peak_memory_bytes": peak_bytes(),
    }


def run_benchmark(config: RunConfig, make: MakeTask) -> dict[str, Any]:
    """Measures one policy on synthetic data and writes benchmark.json."""
    task = make(config)
    with open_folder(config, "-benchmarks") as folder:
        bench = Bench(task)
        sizes = {"warmup": config.warmup_steps, "iterations": config.num_iter, "items": task.batch_size}
        last, results = measure(bench.run, **sizes, unit=task.unit, one_by_one=not bench.training)
        if bench.training:
            results |= {name: last[name].item() for name in ("loss_scale", "skipped_steps")}
        results = {
            "policy": config.policy,
            "amp": config.amp,
            "parameters": bench.parameters,
            "batch_size": task.batch_size,
            "devices": task.parallel.count,
            "warmup_steps": config.warmup_steps,
            "iterations": config.num_iter,
            "compile_seconds": bench.compiled.seconds,
            "program_bytes": bench.compiled.bytes,
            **results,
            **task.benchmark_metrics(results[f"{task.unit}_per_second"]),
        }
        results = _write(folder, "benchmark.json", task, results)
    latency = ", ".join(f"{name} {value:.1f}" for name, value in results["latency_milliseconds"].items())
    say(f"latency in ms: {latency}; compiled in {bench.compiled.seconds:.1f} s; output in {folder.path}")
    return results


def run_comparison(
    config: RunConfig,
    make: MakeTask,
    folder: RunFolder,
    metrics: Mapping[tuple[str, int], Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Measures the policies of --compare interleaved at each batch size. Writes the table as JSON and Markdown.

    Args:
        config: The flags.
        make: Makes a task from flags.
        folder: The output folder.
        metrics: Metrics by policy and batch size, from earlier trainings, for the table.
    """
    rows: list[dict[str, Any]] = []
    for size in config.sizes:
        tasks = {policy: make(_config_of(config, policy, size)) for policy in config.policies}
        task = tasks[config.policies[0]]
        for row in compare({policy: _fitting(each) for policy, each in tasks.items()}, size, config.num_iter):
            speed = task.benchmark_metrics(row["items_per_second"]) if "items_per_second" in row else {}
            rows.append(row | speed | dict((metrics or {}).get((row["policy"], size), {})))
    keys = task.table if config.mode != "train" else {k.replace("test_", "train_"): v for k, v in task.table.items()}
    text = comparison_table(rows, task.unit, keys if metrics else {})
    (folder.path / "comparison.md").write_text(text + "\n")
    say(f"{text}\noutput in {folder.path}")
    return _write(folder, "comparison.json", task, {"rounds": config.num_iter, "rows": rows})


def compare(benches: Mapping[str, Bench | None], size: int, rounds: int) -> list[dict[str, Any]]:
    """Times policies interleaved, so that a slow moment of the machine affects all of them.

    Args:
        benches: By policy; None where memory is too small.
        size: The batch size.
        rounds: Number of measured steps.

    Returns:
        A row for each policy. Milliseconds are medians. The speedup over the first policy is the median of the ratios
        in each round.
    """
    fitting = {policy: bench for policy, bench in benches.items() if bench is not None}
    times = interleaved({policy: bench.run for policy, bench in fitting.items()}, rounds, _WARMUP_ROUNDS)
    base = times.get(next(iter(benches)))
    rows: list[dict[str, Any]] = [{"policy": policy, "batch_size": size} for policy in benches]
    for row in rows:
        if (bench := fitting.get(row["policy"])) is not None:
            own = times[row["policy"]]
            row |= {
                "milliseconds": statistics.median(own) * 1e3,
                "items_per_second": size / statistics.median(own),
                "speedup": statistics.median(a / b for a, b in zip(base, own, strict=True)) if base else None,
                "memory_bytes": bench.compiled.bytes,
                "compile_seconds": bench.compiled.seconds,
            }
    return rows


def comparison_table(rows: Sequence[Mapping[str, Any]], unit: str, metrics: Mapping[str, str]) -> str:
    """The rows of `compare`, with columns for metrics in percent: heads by key."""
    body = []
    for row in rows:
        cells = ["out of memory", "-", "-", "-"]
        if "milliseconds" in row:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
            memory = f"{row['memory_bytes'] / 2**20:,.0f}"
            cells = [f"{row['milliseconds']:.1f}", speedup, f"{row['items_per_second']:,.0f}", memory]
        measured = [f"{row[key]:.2%}" if key in row else "-" for key in metrics]
        body.append([str(row["batch_size"]), row["policy"], *cells, *measured])
    heads = ["batch size", "policy", "ms/step", "speedup", f"{unit}/s", "memory, MiB", *metrics.values()]
    return markdown_table(heads, body)


def _config_of(config: RunConfig, policy: str, size: int) -> Any:
    return dataclasses.replace(config, policy=policy, batch_size=size, compare=None, batch_sizes=None)


def _fitting(task: Task) -> Bench | None:
    """Compiles a task's step and runs it once. Returns None if memory is exhausted."""
    try:
        bench = Bench(task)
        jax.block_until_ready(bench.run())
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise
    return bench


def _write(folder: RunFolder, name: str, task: Task, results: dict[str, Any]) -> dict[str, Any]:
    settings = {"mode": task.config.mode, **task.benchmark_settings(), "environment": environment()}
    write_json(folder.path / name, settings | results)
    return settings | results
