"""Grain batches: planned from seed and step, loaded by threads, and prefetched to the device.

Decoding and resizing release the GIL. Processes decoded no more images per CPU second, and take seconds to start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.imagenet.data import Augmentation, Batch, Dataset

# On JAX 0.10, importing Grain warns that it cannot profile its workers.
_absl = logging.getLogger("absl")
_level = _absl.level
_absl.setLevel(logging.ERROR)
import grain  # noqa: E402 - see above

_absl.setLevel(_level)

# Batches prefetched to the device.
_AHEAD = 2


class Batches(Iterator[Batch]):
    """Batches in order; a context manager, which stops the threads on exit."""

    def __init__(self, batches: Any) -> None:
        self._iterator: Any = iter(batches)

    def __next__(self) -> Batch:
        return next(self._iterator)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the threads and drops the batches already loaded."""
        # Drop the reference: the iterator would close again at interpreter exit, and fail.
        iterator, self._iterator = self._iterator, iter(())
        if isinstance(iterator, grain.DatasetIterator):
            iterator.close()


def train_batches(
    dataset: Dataset,
    batch_size: int,
    seed: int,
    *,
    first: int = 0,
    last: int | None = None,
    augment: bool = True,
    workers: int = 1,
    put: Callable[[Batch], Batch] = jax.device_put,
) -> Batches:
    """The training batches of all epochs, shuffled again in each epoch.

    The batch of a step depends only on `seed` and the step number, not on `first` or `workers`.

    Args:
        dataset: The images.
        batch_size: Images per step.
        seed: Random seed of the order and the augmentation.
        first: Number of completed steps.
        last: Total number of steps of the run; by default the stream is endless.
        augment: Whether to augment images at random.
        workers: Number of threads, which load one batch each.
        put: Transfers a batch to its devices, in a separate thread; by default to the first device.
    """
    images = len(dataset)

    def rows(step: int) -> _Rows:
        epoch, batch = divmod(first + step, images // batch_size)
        augmentation = Augmentation(seed, epoch)
        indices = _permutation(images, augmentation)[batch * batch_size :][:batch_size]
        return _Rows(indices, augmentation if augment else None)

    steps = 2**31 if last is None else last
    return _open(dataset, batch_size, max(0, steps - first), rows, workers, put)


def evaluation_batches(
    dataset: Dataset,
    batch_size: int,
    *,
    workers: int = 1,
    put: Callable[[Batch], Batch] = jax.device_put,
) -> Batches:
    """All images once, in order; the last batch is padded with masked entries. Arguments as in `train_batches`."""

    def rows(step: int) -> _Rows:
        return _Rows(np.arange(step * batch_size, min((step + 1) * batch_size, len(dataset))), None)

    return _open(dataset, batch_size, -(-len(dataset) // batch_size), rows, workers, put)


class _Rows(NamedTuple):
    indices: np.ndarray  # of the images; what is missing to a batch is padding
    augmentation: Augmentation | None


@functools.lru_cache(maxsize=2)
def _permutation(images: int, augmentation: Augmentation) -> np.ndarray:
    return np.random.default_rng(augmentation).permutation(images)


def _open(
    dataset: Dataset,
    batch_size: int,
    steps: int,
    rows: Callable[[int], _Rows],
    workers: int,
    put: Callable[[Batch], Batch],
) -> Batches:
    def load(rows: _Rows) -> Batch:
        batch = dataset.load(rows.indices, rows.augmentation)
        missing = batch_size - len(rows.indices)
        return Batch(*(np.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) for x in batch)) if missing else batch

    threads = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=workers + 1)
    stream = grain.MapDataset.range(steps).map(rows).map(load).to_iter_dataset(threads).map(put)
    return Batches(grain.experimental.ThreadPrefetchIterDataset(stream, prefetch_buffer_size=_AHEAD))
