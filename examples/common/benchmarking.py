"""Measures the time and memory of a step, for one policy or for several interleaved in one process."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.common.input_clock import InputClock
from examples.common.plots import new_figure, save_figure
from perf.memory import peak_bytes, program_bytes
from perf.timing import interleaved


class Compiled(NamedTuple):
    """An executable, its compile time and the memory that it needs."""

    call: jax.stages.Compiled
    seconds: float
    bytes: int


def compile_step(step: jax.stages.Wrapped, *args: Any) -> Compiled:
    """Compiles a jitted function for arguments or their `ShapeDtypeStruct`s, and times the compilation."""
    started = time.perf_counter()
    call = step.lower(*args).compile()
    return Compiled(call, time.perf_counter() - started, program_bytes(call))


def measure(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: Iterator[Any],
    *,
    warmup: int,
    iterations: int,
    items: int,
    unit: str,
    one_by_one: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Runs a step `warmup + iterations` times and measures the last `iterations`.

    Args:
        step: `(state, batch) -> (state, shown)`. It may donate the state.
        state: The initial state.
        batches: At least `warmup + iterations` batches.
        items: Number of items in a batch.
        unit: What an item is, in the plural.
        one_by_one: Whether to wait for each step before dispatching the next, as a server does that answers
            requests one by one. Otherwise one step is always queued, as in training, and the latency is the
            time between the ends of two steps.

    Returns:
        The last state, and a JSON object with the speed, latencies in milliseconds, memory, and the share of the input
        pipeline. If `shown` is a mapping with `loss_scale` and `skipped_steps`, it also has the history of
        the loss scale and the number of skipped steps.
    """
    clock = InputClock()
    before: Any = None
    scaling: list[tuple[Any, Any]] = []
    ends = [time.perf_counter()]
    idle = 0.0
    for index, batch in enumerate(clock.batches(itertools.islice(batches, warmup + iterations))):
        state, shown = step(state, batch)
        clock.dispatched(shown)
        if isinstance(shown, Mapping) and "loss_scale" in shown:
            # Keep nothing else of a step: predictions would fill the device.
            scaling.append((shown["loss_scale"], shown["skipped_steps"]))
        if index == warmup:
            idle = clock.seconds
        if one_by_one or index:
            # Wait for the previous step, so that the device always has another one queued.
            jax.block_until_ready(shown if one_by_one else before)
            ends.append(time.perf_counter())
        before = shown
    jax.block_until_ready(before)
    if not one_by_one:
        ends.append(time.perf_counter())
    seconds = np.diff(ends[warmup:])
    total = float(np.sum(seconds))
    return state, {
        f"{unit}_per_second": items * iterations / total,
        "latency_milliseconds": latencies(seconds),
        "input_share": (clock.seconds - idle) / total,
        "peak_memory_bytes": peak_bytes(),
        **_history(jax.device_get(scaling)),
    }


def latencies(seconds: Any) -> dict[str, float]:
    """Mean and percentiles of latencies in seconds, as milliseconds."""
    values = np.asarray(seconds) * 1e3
    return {"avg": float(values.mean()), **{f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}}


def _history(scaling: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """The history of the loss scale: `[step, scale]` at the start and at each change."""
    if not scaling:
        return {}
    scales = [float(scale) for scale, _ in scaling]
    changes = [index for index, scale in enumerate(scales) if index == 0 or scale != scales[index - 1]]
    return {
        "loss_scale_history": [[index + 1, scales[index]] for index in changes],
        "skipped_steps": int(scaling[-1][1]),
    }


class Case(NamedTuple):
    """One row of a comparison: a policy at a batch size, ready to run."""

    policy: str
    batch_size: int
    run: Callable[[], Any]  # runs one step; its result is ready when the step is done
    compile_seconds: float
    memory_bytes: int


class DoesNotFit(NamedTuple):
    """A case that does not fit in the device's memory."""

    policy: str
    batch_size: int


def compare(cases: Iterable[Case | DoesNotFit], rounds: int, warmup: int) -> list[dict[str, Any]]:
    """Times the policies of a batch size interleaved, so that a slow moment of the machine affects all of them.

    Args:
        cases: The cases, grouped by batch size. With a generator, each batch size is timed and can be freed before the
            next one is made.
        rounds, warmup: Numbers of measured steps and of warm-up steps of each case.

    Returns:
        A row for each case, in order. Milliseconds are medians. The speedup over the first policy of the batch size is
        the median of the ratios in each round.
    """
    rows: list[dict[str, Any]] = []
    for _, group in itertools.groupby(cases, key=lambda case: case.batch_size):
        members = list(group)
        fitting = {case.policy: case for case in members if isinstance(case, Case)}
        times = interleaved({name: case.run for name, case in fitting.items()}, rounds, warmup)
        base = times.get(members[0].policy)
        for member in members:
            row: dict[str, Any] = {"policy": member.policy, "batch_size": member.batch_size}
            if isinstance(member, Case):
                own = times[member.policy]
                row |= {
                    "milliseconds": statistics.median(own) * 1e3,
                    "items_per_second": member.batch_size / statistics.median(own),
                    "speedup": statistics.median(a / b for a, b in zip(base, own, strict=True)) if base else None,
                    "memory_bytes": member.memory_bytes,
                    "compile_seconds": member.compile_seconds,
                }
            rows.append(row)
    return rows


def comparison_table(rows: Sequence[Mapping[str, Any]], unit: str, metrics: Mapping[str, str] | None = None) -> str:
    """The Markdown table of `compare`'s rows.

    Args:
        rows: The rows, which may also hold metrics of their policies.
        unit: What an item of a batch is, in the plural.
        metrics: Heads of further columns to their keys in the rows. Values are shown in percent.
    """
    heads = ["batch size", "policy", "ms/step", "speedup", f"{unit}/s", "memory, MiB", *(metrics or {})]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [f"{row['batch_size']}", row["policy"]]
        if "milliseconds" in row:
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}"
            memory = f"{row['memory_bytes'] / 2**20:,.0f}"
            cells += [f"{row['milliseconds']:.1f}", speedup, f"{row['items_per_second']:,.0f}", memory]
        else:
            cells += ["out of memory", "-", "-", "-"]
        cells += [f"{row[key]:.2%}" if key in row else "-" for key in (metrics or {}).values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot_comparison(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plots time per step, speedup and memory against the batch size, with a curve per policy."""
    panels = {"milliseconds": "ms/step", "speedup": "speedup", "memory_bytes": "memory, bytes"}
    figure, axes = new_figure(len(panels), title)
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            points = [(row["batch_size"], row[key]) for row in rows if row["policy"] == policy and row.get(key)]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=policy)
        axis.set_xscale("log", base=2)
        if key != "speedup":
            axis.set_yscale("log", base=2)
        axis.set_xlabel("batch size")
        axis.set_ylabel(label)
    axes[0].legend(frameon=False)
    save_figure(figure, path)
