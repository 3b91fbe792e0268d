"""Reads JAX's profiler trace: the kernels, their times, and the instruction and program of each.

`jax.profiler` writes an XSpace (`*.xplane.pb`), and `jax.profiler.ProfileData` reads it without TensorFlow. On a GPU,
CUPTI records each kernel on its stream's line, with the HLO instruction that launched it in `hlo_op`. A kernel has the
stat `kernel_details`, and a copy `memcpy_details` (`xla/backends/profiler/gpu/cupti_collector.cc`). On a CPU, the
runtime records thunks with the stat `hlo_op`, but other threads may do their work: kernel times are not reliable.

XProf's library (`xprof` 2.24, formerly `tensorboard-plugin-profile`) can't replace this file. It reads the same XSpace
through the same `ProfileData` interface, and produces JSON tables of operations and kernels for its page. But it does
not relate host marks to device time, and its 32 MB wheel needs google-cloud-storage, duckdb and a web server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData

MARK = "mpjax."  # Prefix of mpjax's own host annotations.


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of a kernel.

    Args:
        name: The kernel's name; on a CPU the instruction's name.
        op: The HLO instruction that launched it; empty if the trace does not record it.
        program: The HLO module of that instruction; empty if the trace does not record it.
        start, end: Seconds since tracing began.
        device: The device's number.
        run: Identifies the execution of the program; 0 if the trace does not record it.
    """

    name: str
    op: str
    program: str
    start: float
    end: float
    device: int = 0
    run: int = 0

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Trace:
    """The kernels, transfers and host marks of a trace.

    Args:
        kernels: The kernels, by start time.
        transfers: Copies from the host outside all programs, as start and end in seconds.
        marks: The marked times of the host by name, as start and end in seconds.
        gpu: Whether the kernels ran on a GPU.
    """

    kernels: tuple[Event, ...]
    transfers: tuple[tuple[float, float], ...]
    marks: dict[str, list[tuple[float, float]]]
    gpu: bool


def mark(name: str) -> jax.profiler.TraceAnnotation:
    """A context manager that marks the host's time in a trace. It costs nothing if no trace is running."""
    return jax.profiler.TraceAnnotation(MARK + name)


@contextlib.contextmanager
def tracing() -> Iterator[list[Trace]]:
    """A context manager that records a trace, and appends it to the yielded list on exit."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls are not needed, and tracing them slows the host.
    options.host_tracer_level = 1
    traces: list[Trace] = []
    with tempfile.TemporaryDirectory(prefix="mpjax_profile_") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield traces
        files = sorted(pathlib.Path(folder).glob("**/*.xplane.pb"))
        if not files:
            raise RuntimeError("jax.profiler wrote no trace (*.xplane.pb)")
        traces.append(read(ProfileData.from_file(str(files[0]))))


def read(data: ProfileData) -> Trace:
    """The kernels and marks of a trace."""
    kernels: list[Event] = []
    transfers: list[tuple[float, float]] = []
    marks: dict[str, list[tuple[float, float]]] = {}
    thunks: list[Event] = []
    for plane in data.planes:
        if plane.name.startswith("/device:GPU:"):
            found, moved = _gpu_events(plane, int(plane.name.rsplit(":", 1)[1].split()[0]))
            kernels += found
            transfers += moved
        elif plane.name == "/host:CPU":
            thunks += _cpu_events(plane)
            for event in (event for line in plane.lines for event in line.events):
                if event.name.startswith(MARK):
                    marks.setdefault(event.name[len(MARK) :], []).append(_span(event))
    gpu = bool(kernels)
    events = sorted(kernels if gpu else thunks, key=lambda event: event.start)
    return Trace(tuple(events), tuple(transfers), {name: sorted(spans) for name, spans in marks.items()}, gpu)


def _span(event: Any) -> tuple[float, float]:
    return event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9


def _gpu_events(plane: Any, device: int) -> tuple[list[Event], list[tuple[float, float]]]:
    kernels, transfers = [], []
    # The plane's other lines summarize the events of the streams' lines.
    for line in (line for line in plane.lines if line.name.startswith("Stream")):
        for event in line.events:
            stats = dict(event.stats)
            moves = "memcpy_details" in stats or "memset_details" in stats
            if "kernel_details" in stats or (moves and "hlo_op" in stats):
                op, program = str(stats.get("hlo_op", "")), str(stats.get("hlo_module", "")).partition("(")[0]
                kernels.append(Event(event.name, op, program, *_span(event), device))
            elif event.name.startswith("MemcpyH2D"):
                transfers.append(_span(event))
    return kernels, transfers


def _cpu_events(plane: Any) -> Iterator[Event]:
    for event in (event for line in plane.lines for event in line.events):
        stats = dict(event.stats)
        if "hlo_op" in stats:
            place = int(stats.get("device_ordinal", 0)), int(stats.get("run_id", 0))
            yield Event(event.name, str(stats["hlo_op"]), str(stats.get("hlo_module", "")), *_span(event), *place)


Spans = Sequence[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted spans of time, merged where they touch.

    Example:
        >>> union([(3, 4), (0, 2), (1, 2.5)])
        [(0, 2.5), (3, 4)]
    """
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def overlap(spans: Spans, others: Spans) -> float:
    """The overlap of the merged `spans` with the merged `others`, in seconds.

    Example:
        >>> overlap([(0, 2), (3, 5)], [(1, 4)])
        2.0
    """
    return max(0.0, float(length(spans) + length(others) - length(union([*spans, *others]))))


def length(spans: Spans) -> float:
    """The length of merged spans in seconds."""
    return sum(end - start for start, end in spans)
