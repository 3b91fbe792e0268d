"""Timing in interleaved rounds in one process, and ratios within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times every run once per round, so that drift of the machine affects all runs equally.

    The order changes from round to round, because the previous run affects the caches.

    Args:
        runs: Functions by name; each is finished when its result is ready.
        rounds: Number of timed rounds.
        warmup: Number of untimed rounds before them.
        clock: Returns the time in seconds; use `time.process_time` if other processes disturb the wall time.

    Returns:
        For each name the seconds of each round.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(warmup + rounds):
        names = names[1:] + names[:1] if i % 2 else names[::-1]
        for name in names:
            start = clock()
            jax.block_until_ready(runs[name]())
            if i >= warmup:
                times[name].append(clock() - start)
    return times


def ratios(times: Mapping[str, list[float]], base: str) -> dict[str, dict[str, Any]]:
    """The median milliseconds of each run, and the median and quartiles of its ratio to `base` within a round."""
    out: dict[str, dict[str, Any]] = {}
    for name, values in times.items():
        per_round = [a / b for a, b in zip(values, times[base], strict=True)]
        low, middle, high = statistics.quantiles(per_round, n=4)
        out[name] = {
            "milliseconds": round(statistics.median(values) * 1e3, 3),
            "ratio": round(middle, 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
        }
    return out
