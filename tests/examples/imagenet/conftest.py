"""Fixtures of the image script's tests."""

from collections.abc import Iterator

import jax
import pytest

from tests.examples.imagenet.runs import make_quick


@pytest.fixture(scope="module")
def quick_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.getbasetemp() / "compiled"))
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield
    jax.config.update("jax_compilation_cache_dir", before)
