"""The kernel that each CPU thread works on, from the nesting of the events in a trace.

XLA's CPU runtime records a thunk on the thread that starts it, and `end: thunk` at the callback of its last task. The
callback may be long after the thunk's work: it first runs whatever comes next, and a task with nothing left to do still
waits in the pool's queue. So the time between the two events is not the thunk's duration.

The pool's events assign threads to thunks. `ThreadpoolListener::Record` is on the thread that enqueues a task, inside
the task's thunk. `StartRegion` with the same number, up to `StopRegion`, is on the thread that runs it. Events inside a
thunk or task on the same thread are nested in it, and their time is theirs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

Span = tuple[float, float]


@dataclasses.dataclass(eq=False)
class Work:
    """A span of a thread's time: a thunk, a task of the pool, or the executor between thunks.

    Args:
        start, end: The span, in ns.
        name: Name of a thunk; empty for tasks and the executor.
        stats: Stats of a thunk.
        task: Number of a task.
        own: The parts of the span without nested events.
    """

    start: float
    end: float
    name: str = ""
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
    task: int | None = None
    own: list[Span] = dataclasses.field(default_factory=list)


def thunks(plane: Any) -> Iterator[tuple[Work, list[Span], float | None]]:
    """The thunks of a CPU's plane of a trace.

    Yields each thunk, the unsorted times in which threads worked on it, and its completion time, all in ns. The
    completion time is None unless it is after the thunk's end and no task accounts for the time between.
    """
    enqueued: dict[int, Work | None] = {}
    ended: dict[int, float] = {}
    works: list[Work] = []
    for line in plane.lines:
        works += _nested(*_of_line(line.events, ended), enqueued)

    def owner(work: Work | None) -> Work | None:
        while work is not None and work.task is not None:
            work = enqueued.get(work.task)
        return work

    tasks: dict[int, list[Span]] = {}
    for work in works:
        if work.task is not None and (of := owner(work)) is not None:
            tasks.setdefault(id(of), []).extend(work.own)
    for work in works:
        if work.name:
            over = ended.get(work.stats.get("_p", -1), 0.0)
            elsewhere = tasks.get(id(work), [])
            until = over if over > work.end and not elsewhere else None
            yield work, work.own + elsewhere, until


def _of_line(events: Any, ended: dict[int, float]) -> tuple[list[Work], list[tuple[float, int]]]:
    """A thread's works, and the times at which it enqueued tasks. Adds the ends of thunks to `ended`."""
    works: list[Work] = []
    records: list[tuple[float, int]] = []
    open_tasks: list[Work] = []
    for event in sorted(events, key=lambda event: event.start_ns):
        start, end = event.start_ns, event.start_ns + event.duration_ns
        if event.name.startswith("end: "):
            ended[dict(event.stats).get("_c", -1)] = start
        elif event.name.startswith("ThunkExecutor::"):
            works.append(Work(start, end))
        elif event.name == "ThreadpoolListener::Record":
            records.append((start, dict(event.stats).get("_p", -1)))
        elif event.name == "ThreadpoolListener::StartRegion":
            open_tasks.append(Work(start, start, task=dict(event.stats).get("_c", -1)))
            works.append(open_tasks[-1])
        elif event.name == "ThreadpoolListener::StopRegion" and open_tasks:
            open_tasks.pop().end = start
        elif "hlo_op" in (stats := dict(event.stats)):
            works.append(Work(start, end, event.name, stats))
    return works, records


def _nested(works: list[Work], records: list[tuple[float, int]], enqueued: dict[int, Work | None]) -> list[Work]:
    """Sets the own time of each work of a thread, and records the work that enqueued each task."""
    stack: list[Work] = []
    known = 0.0

    def advance(time: float) -> None:
        """Assigns the time up to `time` to the innermost work at each instant."""
        nonlocal known
        while stack and stack[-1].end <= time:
            work = stack.pop()
            _add(work, known, work.end)
            known = max(known, work.end)
        if stack:
            _add(stack[-1], known, time)
        known = max(known, time)

    openings: list[tuple[float, int, float, Work | int]] = [(work.start, 0, -work.end, work) for work in works]
    enqueuings: list[tuple[float, int, float, Work | int]] = [(time, 1, 0.0, task) for time, task in records]
    for time, _, _, item in sorted([*openings, *enqueuings], key=lambda row: row[:3]):
        advance(time)
        if isinstance(item, Work):
            item.end = min(item.end, stack[-1].end) if stack else item.end
            stack.append(item)
        else:
            enqueued[item] = stack[-1] if stack else None
    advance(float("inf"))
    return works


def _add(work: Work, start: float, end: float) -> None:
    if end > start:
        work.own.append((start, end))
