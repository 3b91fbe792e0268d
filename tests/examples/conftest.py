"""Fixtures of the scripts' tests."""

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module")
def stored_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiles each program once: runs of the same flags are the same program.

    JAX stores only what compiles for a second unless it is told otherwise, and opens one folder for each process, so
    the cache is reset for the tests of other modules.
    """
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in options}
    for values in (options, before):
        compilation_cache.reset_cache()
        for name, value in values.items():
            jax.config.update(name, value)
        if values is options:
            yield
