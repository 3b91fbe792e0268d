"""Range statistics with NumPy for arrays that the host can read in place. New shapes need no compilation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from mpjax.inspection.gradient import in_host_memory
from mpjax.inspection.numerics.range_statistics import BINS, INFINITY, SIZE_BITS, Limits, RangeNote, RangeProbe

_CHUNK = 1 << 16  # elements: intermediate results stay in the cache
_WORKERS = 2
_WAITING = 8  # Arrays that wait for a worker keep memory alive that the program has freed.


class Workers:
    """Threads that compute statistics while the program continues; NumPy releases the interpreter's lock."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_WORKERS)
        self._free = threading.Semaphore(_WAITING)

    def submit(self, fun: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs a function on a worker; blocks while too many arrays are queued."""
        self._free.acquire()
        future = self._pool.submit(fun, *args)
        future.add_done_callback(lambda _: self._free.release())
        return future


class HostRangeProbe(RangeProbe):
    """A `RangeProbe` whose notes are futures where the host can read the arrays in place."""

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._workers = Workers()

    def take(self, floats: Sequence[Any], pairs: Sequence[tuple[Any, Any]], *given: Any) -> Any:
        if all(map(in_host_memory, (*floats, *(x for pair in pairs for x in pair)))):
            return self._workers.submit(note, floats, pairs, *given)
        return super().take(floats, pairs, *given)


def result(found: Any) -> RangeNote:
    """A note on the host, from either a worker or the device."""
    return found.result() if isinstance(found, Future) else jax.device_get(found)


def note(
    floats: Sequence[Any],
    pairs: Sequence[tuple[Any, Any]],
    limits: Limits,
    axes: tuple[int, ...] | None = None,
    graded: bool = True,
) -> RangeNote:
    """The same result as `range_statistics.note`, computed with NumPy."""
    counts, histogram = np.zeros(7, np.uint32), np.zeros(BINS, np.uint32)
    largest, smallest = 0, INFINITY
    for size in (size for x in floats for size in _chunks(_bits(x))):
        zeros, small, held, finite = (
            size.size - np.count_nonzero(size),
            np.count_nonzero(size <= limits.bits_of(limits.flushed)),
            np.count_nonzero(size < limits.bits_of(limits.overflowed)),
            np.count_nonzero(size < INFINITY),
        )
        counts[:5] += np.array([size.size, zeros, small - zeros, finite - held, size.size - finite], np.uint32)
        if graded:
            histogram += np.bincount(size >> 23, minlength=BINS).astype(np.uint32)
            histogram[[0, BINS - 1]] -= np.array([zeros, size.size - finite], np.uint32)
        if finite < size.size:
            size = size[size < INFINITY]
        if zeros < size.size:
            largest = max(largest, int(size.max()))
            smallest = min(smallest, int((size - np.uint32(1)).min()) + 1)  # zero becomes the largest integer
    for addend, total in pairs:
        counts[5:] += _absorbed(np.asarray(addend), np.asarray(total), limits, axes)
    extremes = np.array([largest, smallest], np.uint32).view(np.float32)
    return counts, extremes, histogram if graded else histogram[:0]


def _bits(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint32)


def _chunks(bits: np.ndarray) -> Iterator[np.ndarray]:
    for i in range(0, bits.size, _CHUNK):
        yield bits[i : i + _CHUNK] & np.uint32(SIZE_BITS)


def _absorbed(addend: np.ndarray, total: np.ndarray, limits: Limits, axes: tuple[int, ...] | None) -> np.ndarray:
    """The counts of nonzero finite elements of an addend, and of those that leave the sum unchanged in half."""
    power = (np.ascontiguousarray(total, np.float32).view(np.uint32) & np.uint32(INFINITY)).view(np.float32)
    with np.errstate(invalid="ignore"):
        place = np.where(np.isfinite(power), power * np.float32(2.0 ** -(limits.bits + 1)), np.float32(0))
    place = place.reshape(total.shape) if axes is None else np.expand_dims(place.reshape(total.shape), axes)
    counted, lost = np.intp(0), np.intp(0)
    # Steps along the first axis keep intermediate results small.
    steps = max(1, _CHUNK * addend.shape[0] // max(addend.size, 1)) if addend.ndim else 1
    for i in range(0, len(addend) if addend.ndim else 1, steps):
        part = np.abs(addend[i : i + steps] if addend.ndim else addend).astype(np.float32)
        own = place[i : i + steps] if addend.ndim and len(place) == len(addend) else place
        nonzero = (part != 0) & (part < np.inf)
        counted += np.count_nonzero(nonzero)
        lost += np.count_nonzero(nonzero & (part <= own))
    return np.array([counted, lost], np.uint32)
