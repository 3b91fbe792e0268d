"""Grain batches: planned from seed and step, loaded by workers, and prefetched to the device."""

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

# On JAX 0.10, importing Grain warns that it cannot profile its workers.
_absl = logging.getLogger("absl")
_level = _absl.level
_absl.setLevel(logging.ERROR)
import grain  # noqa: E402 - see above

_absl.setLevel(_level)

# Batches prefetched to the device.
_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Shard:
    """The part of each batch that this host loads: the `index`-th of `count` equal parts."""

    index: int = 0
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Workers:
    """The number and kind of workers, which load one batch each; the batches do not depend on it.

    Threads start at once and share memory; decoding and resizing release the GIL. Processes take seconds to start,
    but scale further where the GIL is the bottleneck: many cores, small images.
    """

    count: int = 1
    kind: Literal["thread", "process"] = "thread"


_ONE_HOST, _ONE_THREAD = Shard(), Workers()


class Batches(Iterator[Batch]):
    """Batches in order; a context manager, which stops the workers on exit."""

    def __init__(self, dataset: Dataset, batches: Any, collect: bool) -> None:
        self._dataset, self._collect = dataset, collect
        self._iterator: Any = iter(batches)

    def __next__(self) -> Batch:
        try:
            loaded: Loaded = next(self._iterator)
        except RuntimeError as error:
            if "Worker process was terminated" not in str(error):  # Grain has no exception type for this
                raise
            raise UsageError(
                f"a process that loads images has died ({error}), perhaps out of memory. Use fewer --workers, or "
                "--worker-kind thread; --resume continues from the last checkpoint."
            ) from error
        self._dataset.report(loaded.unreadable)
        return loaded.batch

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the workers and drops the batches already loaded."""
        # Drop the reference: the iterator would close again at interpreter exit, and fail.
        iterator, self._iterator = self._iterator, iter(())
        if isinstance(iterator, grain.DatasetIterator):
            iterator.close()
        del iterator
        if self._collect:
            gc.collect()  # Grain's iterators over processes form a cycle that holds the last batches' shared memory


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
    """The training batches of all epochs, shuffled again in each epoch.

    The batch of a step depends only on `seed` and the step number, not on `first` or `workers`. The parts loaded by
    all hosts together equal the batch that a single host would load.

    Args:
        dataset: The images.
        batch_size: Images per step over all hosts; a multiple of `shard.count`.
        seed: Random seed of the order and the augmentation.
        first: Number of completed steps.
        last: Total number of steps of the run; by default the stream is endless.
        augment: Whether to augment images at random.
        shard: The part of each batch that this host loads.
        workers: Number and kind of workers.
        put: Transfers a host's part of a batch to its devices, in a separate thread; by default to the first device.

    Raises:
        UsageError: `batch_size` is not divisible by the number of hosts, or exceeds the number of images.
    """
    steps = steps_per_epoch(dataset, batch_size)
    if not steps:
        raise UsageError(
            f"--batch-size {batch_size}: {dataset.name} has {len(dataset)} images. Give at most this number."
        )
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
    """All images once, in order; the last batch is padded with masked entries.

    Arguments as in `train_batches`. The workers are always threads, since processes would start again on each call.
    """
    threads = dataclasses.replace(workers, kind="thread")
    return _open(dataset, _EvaluationPlan(len(dataset), batch_size, shard), threads, put)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Image indices of each step: a Grain data source."""

    images: int
    batch_size: int
    shard: Shard

    def __post_init__(self) -> None:
        if self.batch_size % self.shard.count:
            raise UsageError(
                f"--batch-size {self.batch_size} cannot be divided among {self.shard.count} hosts; "
                f"use a multiple of {self.shard.count}."
            )

    def _host_part(self, indices: np.ndarray) -> np.ndarray:
        part = self.batch_size // self.shard.count
        return indices[self.shard.index * part :][:part]


class _Rows(NamedTuple):
    indices: np.ndarray  # at most `size`; the rest is padding
    size: int  # of this host's part of a batch
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
        rows = self._host_part(order[batch * self.batch_size :][: self.batch_size])
        return _Rows(rows, len(rows), augmentation if self.augment else None)


@dataclasses.dataclass(frozen=True)
class _EvaluationPlan(_Plan):
    def __len__(self) -> int:
        return -(-self.images // self.batch_size)

    def __getitem__(self, number: int) -> _Rows:
        start = number * self.batch_size
        rows = self._host_part(np.arange(start, min(start + self.batch_size, self.images)))
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
            flags.FLAGS.mark_as_parsed()  # Grain reads absl flags, all at their defaults here
        alone = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        options = grain.MultiprocessingOptions(num_workers=workers.count)
        stream = loaded.to_iter_dataset(alone).mp_prefetch(options, worker_init_fn=_start_worker)
        stream = stream.map(_copied)
    else:
        threads = grain.ReadOptions(num_threads=workers.count, prefetch_buffer_size=workers.count + 1)
        stream = loaded.to_iter_dataset(threads)
    stream = stream.map(lambda loaded: loaded._replace(batch=put(loaded.batch)))
    ahead = grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=_AHEAD)
    return Batches(dataset, ahead, in_processes)


def _copied(loaded: Loaded) -> Loaded:
    # On the CPU a JAX array may alias its source, which here is shared memory owned by a worker.
    return loaded._replace(batch=Batch(*(np.array(x) for x in loaded.batch)))


def _start_worker(_index: int, _count: int) -> None:
    """Ignores Ctrl-C, which the parent handles, and exits when the parent does, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None  # this is a child

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
