"""Set-up of the tests: four CPU devices, quick compilation, a GPU marker."""

import os

# Before JAX starts: shard_map and sharding tests need several devices on any machine; and these programs
# are compiled far longer than they run (LLVM's optimisation takes three quarters of the tests' time).
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")

import jax
import pytest


def pytest_collection_modifyitems(items):
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
