"""Fixtures of the scripts' tests."""

from collections.abc import Iterator

import pytest

from tests.examples.quick import make_quick


@pytest.fixture(scope="module")
def stored_programs(stored_programs: None) -> Iterator[None]:
    """Compiles each program once, for quick runs."""
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield
