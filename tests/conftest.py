"""Set-up of the tests: four CPU devices, quick compilation, which tests share a process, a GPU marker."""

import os

# Before JAX starts: shard_map and sharding tests need several devices on any machine; and these programs
# are compiled far longer than they run (LLVM's optimisation takes three quarters of the tests' time).
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")

import jax
import pytest


def pytest_collection_modifyitems(items):
    _share_processes(items)
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


def _share_processes(items):
    """Tests of one file run in one process, which its fixtures and caches are for; those of the zoo by program.

    The zoo's come last: many small groups fill whichever process is free.
    """
    of_zoo = {item: "casting/test_zoo" in item.nodeid for item in items}
    for item in items:
        program = item.callspec.params.get("name") if of_zoo[item] and hasattr(item, "callspec") else None
        item.add_marker(pytest.mark.xdist_group(program or item.nodeid.split("::")[0]))
    items.sort(key=of_zoo.__getitem__)
