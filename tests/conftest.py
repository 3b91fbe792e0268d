"""Set-up of the tests: four CPU devices, quick compilation, strict dtype promotion, process groups, a GPU marker."""

import collections
import contextlib
import functools
import gc
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator

# Before JAX starts: shard_map and sharding tests need several devices on any machine; and these programs
# are compiled far longer than they run (LLVM's optimisation takes three quarters of the tests' time).
# On a busy machine, the threads of four devices may take longer to meet than the 40 s after which XLA aborts.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
)
# NumPy evaluates many programs of small matmuls, for which further threads mostly spin: half of the CPU time. The
# variable is for other processes and SciPy; a plugin of pytest has already imported NumPy here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Programs that several tests compile are compiled once, by whichever process of the run is first. Not those of child
# processes of tests: JAX before 0.12 writes to the standard error when it loads a program.
if "MPJAX_COMPILED" not in os.environ:
    _compiled = tempfile.TemporaryDirectory(prefix="mpjax-compiled-")
    os.environ["MPJAX_COMPILED"] = _compiled.name

import flax.linen
import flax.nnx
import jax
import optax
import pytest
import threadpoolctl
from _pytest.doctest import DoctestModule
from jax._src.lru_cache import LRUCache
from jax.experimental.compilation_cache import compilation_cache
from xdist.scheduler import LoadScopeScheduling

from tests import quick_kernels
from tests.sampling import sampled, sampled_of_file

gc.disable()  # while tests are collected: nearly all objects stay
threadpoolctl.threadpool_limits(1, user_api="blas")
jax.config.update("jax_compilation_cache_dir", os.environ["MPJAX_COMPILED"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def put_whole(cache: LRUCache, key: str, value: bytes):
    """Writes a compiled program beside its place, then moves it: JAX writes in place, and others read half of it."""
    with tempfile.NamedTemporaryFile(dir=cache.path, delete=False) as file:
        file.write(value)
    os.replace(file.name, pathlib.Path(cache.path, f"{key}-cache"))


LRUCache.put = put_whole

# Scripts that tests run, not modules with doctests.
collect_ignore = ["user_script.py", "launcher/scripts"]

# Folders whose programs promote implicitly, as a user's may: the scripts and the benchmarks.
STANDARD_PROMOTION = ("tests/examples/", "tests/benchmarks/")
# Functions of other libraries that promote implicitly: Adam's step count, Flax's norms and pooling in half.
PROMOTING = (
    (optax.tree, "bias_correction"),
    *(
        (module, name)
        for module in (flax.linen.normalization, flax.nnx.nn.normalization)
        for name in ("_compute_stats", "_normalize")
    ),
    (flax.linen, "avg_pool"),
)


def _in_standard_promotion(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    if hasattr(function, "__code__"):  # In reports, the user's line is the first outside of libraries.
        wrapped.__code__ = wrapped.__code__.replace(co_filename=function.__code__.co_filename)
    return wrapped


for _module, _name in PROMOTING:
    setattr(_module, _name, _in_standard_promotion(getattr(_module, _name)))


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no doctests, which each process would look for."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Runs a test, its fixtures included, under strict dtype promotion unless it is marked `standard_promotion`."""
    from mpjax.kernels import unscaled  # after the functions above are replaced

    standard = item.get_closest_marker("standard_promotion") or item.nodeid.startswith(STANDARD_PROMOTION)
    unscaled._scaling_loops.clear()  # An optimizer of an earlier test may live until its cycle is collected.
    quick = quick_kernels.IS_OLDEST and item.nodeid.startswith(quick_kernels.FOLDERS)
    with (
        jax.numpy_dtype_promotion("standard" if standard else "strict"),
        quick_kernels.quick_kernels() if quick else contextlib.nullcontext(),
    ):
        return (yield)


def pytest_collection_finish():
    # Tracing allocates so much that the default thresholds spend an eighth of the tests' time on collections.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def _deselect(config, items, kept):
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, kept, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, kept, strict=True) if keep]


def values(item) -> dict[str, str]:
    """The parameters of a case, as texts."""
    return {name: repr(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}


@pytest.hookimpl(trylast=True)  # of the cases that -k chooses
def pytest_collection_modifyitems(config, items):
    files = collections.defaultdict(lambda: collections.defaultdict(list))
    for item in items:
        file, _, test = item.nodeid.partition("[")[0].partition("::")
        files[file][test].append(item)
    kept = set()
    for file, tests in files.items():
        running = sampled_of_file(file, len(tests))
        for test, of_test in (each for i, each in enumerate(tests.items()) if i in running):
            kept.update(of_test[i] for i in sampled(f"{file}::{test}", [values(item) for item in of_test]))
    _deselect(config, items, [item in kept for item in items])
    if "exhaustive" not in config.option.markexpr:
        _deselect(config, items, ["exhaustive" not in item.keywords for item in items])
    if any(device.platform == "gpu" for device in jax.devices()):
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


# Folders whose tests run in one process: they train the same small models, or compile the same small programs.
SHARING = ("tests/examples/imagenet/", "tests/examples/speech/", "tests/examples/c", "mpjax/")  # c: common and custom


def process_group(nodeid: str) -> str:
    """A file, whose tests share fixtures and compiled programs, or a program of the zoo."""
    file, _, test = nodeid.partition("::")
    if file.endswith("casting/test_zoo.py") and "[" in test:
        return re.search(r"\[(\w+)", test)[1]
    return next((folder for folder in SHARING if file.startswith(folder)), file)


# Files with one or two tests of many seconds. Last in the queue, one process would run them while the other waits.
LONG = ("tests/test_random_training.py", "tests/test_types.py")


class ByGroup(LoadScopeScheduling):
    """Few long tests start first, then the largest groups; the small ones of the zoo fill whichever process is free.

    Marks do not group tests: `--dist loadgroup` ignores them with pytest 9.2 and pytest-xdist 3.8.
    """

    def _split_scope(self, nodeid):
        return process_group(nodeid)

    def _assign_work_unit(self, node):
        for group in LONG:
            if group in self.workqueue:
                self.workqueue.move_to_end(group, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)  # `-p no:xdist` has no such hook
def pytest_xdist_make_scheduler(config, log):
    return ByGroup(config, log)


PROCESSES: dict[str, str] = {}  # of each group of tests


def pytest_runtest_logreport(report):
    """Fails the run if a group of tests is split over processes, which only costs time and is easy to miss."""
    if node := getattr(report, "node", None):  # only in the process that starts the others
        group = process_group(report.nodeid)
        process = PROCESSES.setdefault(group, node.gateway.id)
        assert process == node.gateway.id, f"tests of {group} ran in processes {process} and {node.gateway.id}"


@pytest.fixture(scope="module")
def always_compiled() -> Iterator[None]:
    """Compiles programs again, for tests of the time that it takes."""
    for enabled in (False, True):
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()  # JAX asks once whether the cache is enabled
        if not enabled:
            yield
