"""How fast a step is and what it takes: one by one, or several policies interleaved in one process."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.measure import interleaved
from examples.common.input_clock import InputClock
from examples.common.plots import new_figure, save_figure


class Compiled(NamedTuple):
    """An executable, how long it took to make, and what it needs."""

    call: jax.stages.Compiled
    seconds: float
    bytes: int


def compile_step(step: jax.stages.Wrapped, *args: Any) -> Compiled:
    """Compiles a jitted function for arguments or their `ShapeDtypeStruct`s, on the clock."""
    started = time.perf_counter()
    call = step.lower(*args).compile()
    return Compiled(call, time.perf_counter() - started, program_bytes(call))


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory of a program while it runs: arguments, results and temporaries, what is donated once."""
    memory: Any = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return total - memory.alias_size_in_bytes


def peak_bytes() -> int | None:
    """The most that the allocator of the first device ever held; None where it does not count (a CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None


def memory_limit(gibibytes: float | None) -> tuple[int, str]:
    """Bytes that a program may take, and who says so: the flag, the device, or, on a CPU, the machine."""
    if gibibytes is not None:
        return int(gibibytes * 2**30), "--memory-limit"
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"], device.device_kind
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "all of this machine's"


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of JAX says that the device's memory is exhausted."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


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
    """Runs a step `warmup + iterations` times and measures the latter.

    Args:
        step: `(state, batch) -> (state, shown)`; it may donate the state.
        state: to start from.
        batches: at least `warmup + iterations` of them.
        items: of `unit` in a batch.
        one_by_one: wait for each step before the next is given to the device, as a server does that answers
            one request after the other. Otherwise one step is always queued, as in training, and the
            latency is the time between the ends of two steps.

    Returns:
        The last state, and a JSON object: speed, latencies in milliseconds, memory, the share of the input pipeline;
        where `shown` is a mapping with `loss_scale` and `skipped_steps`, these too.
    """
    clock = InputClock()
    outputs: list[Any] = []
    ends = [time.perf_counter()]
    idle = 0.0
    for index, batch in enumerate(clock.batches(itertools.islice(batches, warmup + iterations))):
        state, shown = step(state, batch)
        clock.dispatched(shown)
        outputs.append(shown)
        if index == warmup:
            idle = clock.seconds
        if one_by_one or index:
            # The step before, so that the device always has another one in its queue.
            jax.block_until_ready(outputs[index if one_by_one else index - 1])
            ends.append(time.perf_counter())
    jax.block_until_ready(outputs[-1])
    if not one_by_one:
        ends.append(time.perf_counter())
    seconds = np.diff(ends[warmup:])
    total = float(np.sum(seconds))
    return state, {
        f"{unit}_per_second": items * iterations / total,
        "latency_milliseconds": latencies(seconds),
        "input_share": (clock.seconds - idle) / total,
        "peak_memory_bytes": peak_bytes(),
        **_scaling_of(jax.device_get(outputs)),
    }


def latencies(seconds: Any) -> dict[str, float]:
    """Mean and percentiles, in milliseconds, of latencies in seconds."""
    values = np.asarray(seconds) * 1e3
    return {"avg": float(values.mean()), **{f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}}


def _scaling_of(outputs: Sequence[Any]) -> dict[str, Any]:
    """How the loss scale went: `[step, scale]` at the start and at each change."""
    if not outputs or not isinstance(outputs[-1], Mapping) or "loss_scale" not in outputs[-1]:
        return {}
    scales = [float(shown["loss_scale"]) for shown in outputs]
    changes = [index for index, scale in enumerate(scales) if index == 0 or scale != scales[index - 1]]
    return {
        "loss_scale_history": [[index + 1, scales[index]] for index in changes],
        "skipped_steps": int(outputs[-1]["skipped_steps"]),
    }


class Case(NamedTuple):
    """One row of a comparison: a policy at a batch size, ready to run."""

    policy: str
    batch_size: int
    run: Callable[[], Any]  # one step; its result says when it is done
    compile_seconds: float
    memory_bytes: int


class DoesNotFit(NamedTuple):
    """A case that the device has no memory for."""

    policy: str
    batch_size: int


def compare(cases: Iterable[Case | DoesNotFit], rounds: int, warmup: int) -> list[dict[str, Any]]:
    """Times all policies of a batch size in turns, so that a slow moment of the machine hits all alike.

    Args:
        cases: may be a generator: each batch size is timed, and can be freed, before the next one is made.
        rounds, warmup: steps of each case that count, and before them.

    Returns:
        A row for each case, in order: milliseconds are medians, the speedup (over the first policy of the batch
        size) is the median of the ratios in each round.
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
        rows: with the metrics of a policy in each of its rows, where there are any.
        unit: what a batch counts, in the plural.
        metrics: head of a further column to its key in the rows; shown in percent.
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
    """Draws time per step, speedup and memory over the batch size, a curve for each policy."""
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


def largest_batch(bytes_needed: Callable[[int], int], limit: int, multiple: int = 1, most: int = 2**20) -> int | None:
    """The largest batch size `multiple * 2**k` whose step needs no more than `limit` bytes; None if none fits.

    Memory is nearly linear in the batch size, so two programs tell where to look: a handful are compiled
    instead of one for each power of two.

    Args:
        bytes_needed: of a step at a batch size; asked for each size at most once.
        limit: in bytes.
        multiple: the number of devices that share a batch.
        most: no batch size beyond this is tried.
    """
    needed: dict[int, int] = {}

    def fits(power: int) -> bool:
        if power not in needed:
            needed[power] = bytes_needed(multiple * 2**power)
        return needed[power] <= limit

    top = (most // multiple).bit_length() - 1
    if not fits(0):
        return None
    power = min(3, top)
    while power > 0 and not fits(power):
        power -= 1
    slope = max(1.0, (needed[power] - needed[0]) / max(1, 2**power - 1))
    guess = min(top, max(power, math.floor(math.log2(max(1.0, 1 + (limit - needed[0]) / slope)))))
    while guess > 0 and not fits(guess):
        guess -= 1
    while guess < top and fits(guess + 1):
        guess += 1
    return multiple * 2**guess
