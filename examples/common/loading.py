"""Batches that threads load with Grain ahead of the device.

Decoding and resizing release the GIL. Processes decoded no more images per CPU second, and take seconds to start.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax

# On JAX 0.10, importing Grain warns that it cannot profile its workers. Orbax logs a traceback for each file that it
# can't write: the error that it raises is enough.
logging.getLogger("absl").setLevel(logging.CRITICAL)
import grain  # noqa: E402 - see above

_AHEAD = 2  # batches prefetched to the device


class Loading(NamedTuple):
    """How batches are loaded, and where they go."""

    workers: int = 1  # threads, which load one batch each
    put: Callable[[Any], Any] = jax.device_put  # transfers a batch to its devices, in a separate thread
    own: Callable[[int], slice] = slice  # the rows to load of a batch of a size: each of several processes has its own


ALONE = Loading()


def loaded(source: Any, load: Callable[[Any], Any], loading: Loading) -> Generator[Any, None, None]:
    """The batches that `load` makes of a source's items, in order. Closing the generator stops the threads.

    Args:
        source: A sequence with random access, or a `grain.MapDataset`.
        load: Runs in a thread.
        loading: The number of threads, and the transfer.
    """
    source = source if isinstance(source, grain.MapDataset) else grain.MapDataset.source(source)
    threads = grain.ReadOptions(num_threads=loading.workers, prefetch_buffer_size=loading.workers + 1)
    stream = source.map(load).to_iter_dataset(threads).map(loading.put)
    batches: Any = iter(grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=_AHEAD))
    with contextlib.closing(batches):
        yield from batches
