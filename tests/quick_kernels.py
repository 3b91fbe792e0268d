"""Kernels that the oldest jaxlib compiles in a third of the time: without MLIR. Newer versions have no such choice.

Some of their roundings differ (to float8 they round twice), so tests of folders that compare numbers bitwise with NumPy
or with another program do not use them.
"""

import contextlib
import importlib.metadata

from jax._src import compiler

IS_OLDEST = importlib.metadata.version("jaxlib").startswith("0.10.")
FOLDERS = ("tests/examples/", "tests/inspection/", "tests/launcher/", "tests/planning/", "tests/test_docs.py")
OPTIONS = {"xla_cpu_use_fusion_emitters": False} if IS_OLDEST else {}
FLAGS = "".join(f" --{name}={str(value).lower()}" for name, value in OPTIONS.items())  # for other processes

_get_compile_options = compiler.get_compile_options


@contextlib.contextmanager
def quick_kernels():
    """Programs that are compiled inside have these kernels, for the rest of the process."""

    def get_compile_options(*args, env_options_overrides=None, **kwargs):
        return _get_compile_options(*args, env_options_overrides=OPTIONS | (env_options_overrides or {}), **kwargs)

    compiler.get_compile_options = get_compile_options
    try:
        yield
    finally:
        compiler.get_compile_options = _get_compile_options
