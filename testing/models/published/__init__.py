"""The models of `benchmarks.training`. Each module registers its own models: a new model is a new file."""

import importlib
import pkgutil

from .workload import WORKLOADS as WORKLOADS
from .workload import Batch as Batch
from .workload import Workload as Workload

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
