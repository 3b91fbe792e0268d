"""`--audit` and `--profile`: the training step under inspection, instead of a run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import mpjax
from examples.imagenet.config import Config
from examples.imagenet.data import Augmentation, Batch, Dataset, check_batch_size, train_batches
from examples.imagenet.loop import batch_like, open_data
from examples.imagenet.training import create_training

_PROFILED_STEPS = 20


def inspect(config: Config) -> None:
    """Prints the reports that the flags ask for.

    Raises:
        UsageError: data or flags do not fit.
    """
    dataset, _ = open_data(config)
    check_batch_size(dataset, config.batch_size)
    training = create_training(config, dataset, config.epochs * (len(dataset) // config.batch_size))
    if config.audit:
        print(mpjax.audit(training.train_step, training.state, batch_like(dataset, config.batch_size)))
    if config.profile:
        batches = _epochs(config, dataset)
        print(mpjax.profile(training.train_step, training.state, batches=batches, steps=_PROFILED_STEPS))


def _epochs(config: Config, dataset: Dataset) -> Iterator[Batch]:
    """The batches of a run, one epoch after the other."""
    for epoch in itertools.count():
        yield from train_batches(dataset, config.batch_size, Augmentation(config.seed, epoch), config.augment, 0)
