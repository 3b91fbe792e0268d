"""Seeds the global generators, and replaces the data of tensorflow_datasets by generated data.

Python imports this file when a process of `benchmarks.foreign_scripts` starts.
"""

import atexit
import importlib.abc
import importlib.machinery
import os
import random
import sys

import numpy as np

SEED = int(os.environ["FOREIGN_SEED"])
random.seed(SEED)
np.random.seed(SEED)  # noqa: NPY002


class MockedDatasets(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports tensorflow_datasets, then mocks it by its own `testing.mock_data`."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "tensorflow_datasets":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader  # which finds the package's files
        self.loader.exec_module(module)
        mock(module, int(os.environ["FOREIGN_EXAMPLES"]))


def mock(tfds, count):
    from tensorflow_datasets.testing import mocking

    from benchmarks.foreign_scripts.data import learnable

    def begin(self, *args, seed=0, original=mocking.RandomFakeGenerator.__init__, **options):
        original(self, *args, seed=seed + SEED, **options)

    def example(self, rng, original=mocking.RandomFakeGenerator._generate_example):
        return learnable(original(self, rng), rng)

    def splits(self, original=tfds.core.DatasetInfo.splits.fget):
        names = ("train", "validation", "test")
        mocked = [tfds.core.SplitInfo(name=name, shard_lengths=[count], num_bytes=0) for name in names]
        return original(self) or tfds.core.splits.SplitDict(mocked)

    mocking.RandomFakeGenerator.__init__ = begin
    mocking.RandomFakeGenerator._generate_example = example
    tfds.core.DatasetInfo.splits = property(splits)
    mocked = tfds.testing.mock_data(num_examples=count)
    mocked.__enter__()
    atexit.register(mocked.__exit__, None, None, None)


sys.meta_path.insert(0, MockedDatasets())
