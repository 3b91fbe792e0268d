"""JAX's profiler trace as kernels: what ran on the device when, and for which instruction of which program.

`jax.profiler` writes an XSpace (`*.xplane.pb`), and `jax.profiler.ProfileData` reads it without TensorFlow. On a GPU
CUPTI records each kernel on its stream's line (`xla/backends/profiler/gpu/cupti_collector.cc`: a kernel has the stat
`kernel_details`, a copy `memcpy_details`), with the HLO instruction that launched it in `hlo_op`. On a CPU
the runtime records thunks with the same stat; `cpu_threads.py` says which threads worked on them when.

XProf's own library (`xprof` 2.24, formerly `tensorboard-plugin-profile`) can't take this file's place: it reads the
same XSpace through the same `ProfileData` interface, and has tables of operations and kernels as JSON for its page, but
nothing of host marks against device time; the wheel is 32 MB and needs google-cloud-storage, duckdb and a web server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.profiler import ProfileData

from mpjax.inspection.profile import cpu_threads

_FILES = "**/*.xplane.pb"
MARK = "mpjax."  # Begins the names of our own annotations of the host's time.


@dataclasses.dataclass(frozen=True)
class Event:
    """One run of a kernel.

    Args:
        name: the kernel's name; on a CPU the instruction's.
        op: the HLO instruction that launched it, as the trace says; empty if it does not.
        program: the HLO module of that instruction; empty if the trace does not say.
        start, end: seconds since tracing began.
        device: the device's number.
        run: tells the executions of programs apart; 0 where the trace does not.
        spans: on a CPU, when some thread worked on it; empty on a GPU, where it runs from start to end.
        until: on a CPU, when it was over, if the trace does not tell what was done for it after `end`.
    """

    name: str
    op: str
    program: str
    start: float
    end: float
    device: int = 0
    run: int = 0
    spans: tuple[tuple[float, float], ...] = ()
    until: float | None = None

    @property
    def running(self) -> tuple[tuple[float, float], ...]:
        """When it runs."""
        return self.spans or ((self.start, self.end),)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a trace says of devices and of our marks on the host.

    Args:
        kernels: by start time.
        transfers: when data came from the host, outside of any program: start and end in seconds.
        marks: the host's annotated times by name, start and end in seconds.
        gpu: whether the kernels are a GPU's.
    """

    kernels: tuple[Event, ...]
    transfers: tuple[tuple[float, float], ...]
    marks: dict[str, list[tuple[float, float]]]
    gpu: bool


def mark(name: str) -> jax.profiler.TraceAnnotation:
    """Marks the host's time inside `with` in a trace; costs nothing where none is taken."""
    return jax.profiler.TraceAnnotation(MARK + name)


@contextlib.contextmanager
def tracing(keep: str | os.PathLike[str] | None = None) -> Iterator[list[Trace]]:
    """Traces what runs inside `with`: the list that it gives has the trace afterwards.

    Args:
        keep: a folder where the trace stays, also in Perfetto's format.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls are of no interest here and slow the host down.
    options.host_tracer_level = 1
    traces: list[Trace] = []
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="mpjax_profile_")))
        old = set(folder.glob(_FILES))
        with jax.profiler.trace(folder, create_perfetto_trace=keep is not None, profiler_options=options):
            yield traces
        files = sorted(set(folder.glob(_FILES)) - old)
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
    # Other lines of the plane sum up what is on the streams' lines.
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


def _cpu_events(plane: Any) -> list[Event]:
    found = []
    for thunk, worked, until in cpu_threads.thunks(plane):
        spans = tuple(union((start * 1e-9, end * 1e-9) for start, end in worked))
        if spans:
            found.append(
                Event(
                    name=thunk.name,
                    op=str(thunk.stats["hlo_op"]),
                    program=str(thunk.stats.get("hlo_module", "")),
                    start=spans[0][0],
                    end=spans[-1][1],
                    device=int(thunk.stats.get("device_ordinal", 0)),
                    run=int(thunk.stats.get("run_id", 0)),
                    spans=spans,
                    until=None if until is None else until * 1e-9,
                )
            )
    return found


Spans = Sequence[tuple[float, float]]


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of time, merged where they touch, in order.

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
    """How much of the merged `spans` is inside the merged `others`, in seconds.

    Example:
        >>> overlap([(0, 2), (3, 5)], [(1, 4)])
        2.0
    """
    total, j = 0.0, 0
    for start, end in spans:
        while j < len(others) and others[j][1] <= start:
            j += 1
        k = j
        while k < len(others) and others[k][0] < end:
            total += min(end, others[k][1]) - max(start, others[k][0])
            k += 1
    return total


def length(spans: Spans) -> float:
    """The length of merged spans in seconds."""
    return sum(end - start for start, end in spans)
