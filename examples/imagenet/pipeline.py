"""Batches by Grain: planned from seed and step, loaded by workers, put on the device ahead of time."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from absl import flags

from examples.common.cli import UsageError
from examples.imagenet.data import Augmentation, Batch, Dataset, Loaded, steps_per_epoch

# On JAX 0.10 Grain warns, when imported, that it cannot profile its workers.
_absl = logging.getLogger("absl")
_level = _absl.level
_absl.setLevel(logging.ERROR)
import grain  # noqa: E402 - see above

_absl.setLevel(_level)

# Batches on the device, or on their way there, while it works on an earlier one.
_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of each batch that this host loads: the `index`-th of `count` equal ones."""

    index: int = 0
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Workers:
    """Who loads batches, each a whole one; it changes no batch.

    Threads start at once and share memory; decoding and resizing leave Python's lock. Processes take seconds
    to start, and go on scaling where that lock is what limits: many cores, small images.
    """

    count: int = 1
    kind: Literal["thread", "process"] = "thread"


_ONE_HOST, _ONE_THREAD = Shard(), Workers()


class Batches(Iterator[Batch]):
    """Batches in order; a context manager, since whoever leaves early has workers to stop."""

    def __init__(self, dataset: Dataset, batches: Any, collect: bool) -> None:
        self._dataset, self._collect = dataset, collect
        self._iterator: Any = iter(batches)

    def __next__(self) -> Batch:
        try:
            loaded: Loaded = next(self._iterator)
        except RuntimeError as error:
            if "Worker process was terminated" not in str(error):  # Grain has no exception of its own for it
                raise
            raise UsageError(
                f"a process that loads images has died ({error}). Was it out of memory? Take fewer --workers, or "
                f"--worker-kind thread; --resume goes on from the last checkpoint."
            ) from error
        self._dataset.report(loaded.unreadable)
        return loaded.batch

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the workers; batches that they have made are dropped."""
        # Not kept: it would close again at interpreter exit, when it no longer can.
        iterator, self._iterator = self._iterator, iter(())
        if isinstance(iterator, grain.DatasetIterator):
            iterator.close()
        del iterator
        if self._collect:
            gc.collect()  # Grain's iterators over processes hold each other, and the last batches' shared memory


def train_batches(
    dataset: Dataset,
    batch_size: int,
    seed: int,
    *,
    first: int = 0,
    last: int | None = None,
    augment: bool = True,
    shard: Shard = _ONE_HOST,
    workers: Workers = _ONE_THREAD,
    put: Callable[[Batch], Batch] = jax.device_put,
) -> Batches:
    """The batches of training, epoch after epoch, each in an order of its own.

    A step's batch follows from `seed` and its number alone, whatever `first` and `workers` are; and the parts that
    the hosts load are together the batch that one host would load.

    Args:
        dataset: the images.
        batch_size: images in a step, of all hosts together; a multiple of `shard.count`.
        seed: of order and augmentation.
        first: steps that are already done.
        last: steps in the whole run; without it the stream does not end.
        augment: whether images are changed at random.
        shard: the part of each batch that this host loads.
        workers: who loads.
        put: brings a host's part of a batch to its devices, in a thread of its own; as it is: to the first device.

    Raises:
        UsageError: `batch_size` cannot be divided among the hosts, or is more than there are images.
    """
    steps = steps_per_epoch(dataset, batch_size)
    if not steps:
        raise UsageError(f"--batch-size {batch_size}: {dataset.name} has {len(dataset)} images. Give at most that.")
    last = 2**31 if last is None else last
    plan = _TrainPlan(len(dataset), batch_size, shard, first, max(0, last - first), seed, augment)
    return _open(dataset, plan, workers, put)


def evaluation_batches(
    dataset: Dataset,
    batch_size: int,
    *,
    shard: Shard = _ONE_HOST,
    workers: Workers = _ONE_THREAD,
    put: Callable[[Batch], Batch] = jax.device_put,
) -> Batches:
    """All images once, in order; the last batch is filled up with masked entries.

    Arguments as in `train_batches`; the workers are threads, since processes would have to start each time.
    """
    threads = dataclasses.replace(workers, kind="thread")
    return _open(dataset, _EvaluationPlan(len(dataset), batch_size, shard), threads, put)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Indices of images, step by step: what Grain calls a data source."""

    images: int
    batch_size: int
    shard: Shard

    def __post_init__(self) -> None:
        if self.batch_size % self.shard.count:
            raise UsageError(
                f"--batch-size {self.batch_size} cannot be divided among {self.shard.count} hosts; "
                f"take a multiple of {self.shard.count}."
            )

    def _own(self, indices: np.ndarray) -> np.ndarray:
        part = self.batch_size // self.shard.count
        return indices[self.shard.index * part :][:part]


class _Rows(NamedTuple):
    indices: np.ndarray  # at most as many as this host's part of a batch: the rest is filled up
    size: int  # of that part
    augmentation: Augmentation | None


@dataclasses.dataclass(frozen=True)
class _TrainPlan(_Plan):
    first: int
    steps: int
    seed: int
    augment: bool

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, number: int) -> _Rows:
        epoch, batch = divmod(self.first + number, self.images // self.batch_size)
        augmentation = Augmentation(self.seed, epoch)
        order = _permutation(self.images, augmentation)
        rows = self._own(order[batch * self.batch_size :][: self.batch_size])
        return _Rows(rows, len(rows), augmentation if self.augment else None)


@dataclasses.dataclass(frozen=True)
class _EvaluationPlan(_Plan):
    def __len__(self) -> int:
        return -(-self.images // self.batch_size)

    def __getitem__(self, number: int) -> _Rows:
        start = number * self.batch_size
        rows = self._own(np.arange(start, min(start + self.batch_size, self.images)))
        return _Rows(rows, self.batch_size // self.shard.count, None)


@functools.lru_cache(maxsize=2)
def _permutation(images: int, augmentation: Augmentation) -> np.ndarray:
    return np.random.default_rng(augmentation).permutation(images)


def _load(dataset: Dataset, rows: _Rows) -> Loaded:
    batch, unreadable = dataset.load(rows.indices, rows.augmentation)
    missing = rows.size - len(rows.indices)
    if missing:
        batch = Batch(*(np.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in batch))
    return Loaded(batch, unreadable)


def _open(dataset: Dataset, plan: _Plan, workers: Workers, put: Callable[[Batch], Batch]) -> Batches:
    loaded = grain.MapDataset.source(plan).map(functools.partial(_load, dataset))
    in_processes = workers.kind == "process" and not dataset.in_memory
    if in_processes:
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain reads flags of its own, and these are all at their defaults
        alone = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        options = grain.MultiprocessingOptions(num_workers=workers.count)
        stream = loaded.to_iter_dataset(alone).mp_prefetch(options, worker_init_fn=_start_worker)
        stream = stream.map(_own_memory)
    else:
        threads = grain.ReadOptions(num_threads=workers.count, prefetch_buffer_size=workers.count + 1)
        stream = loaded.to_iter_dataset(threads)
    stream = stream.map(lambda loaded: loaded._replace(batch=put(loaded.batch)))
    ahead = grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=_AHEAD)
    return Batches(dataset, ahead, in_processes)


def _own_memory(loaded: Loaded) -> Loaded:
    # On the CPU a JAX array may be the very memory that it was put from, which a worker here has lent.
    return loaded._replace(batch=Batch(*(np.array(x) for x in loaded.batch)))


def _start_worker(_index: int, _count: int) -> None:
    """Leaves Ctrl-C to the parent, and ends with it even where it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a child

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
