"""Fixtures of the scripts' tests."""

from collections.abc import Iterator

import pytest

from testing import cheap_keys


@pytest.fixture(scope="module")
def stored_programs(stored_programs: None) -> Iterator[None]:
    """Programs compiled once, whose random numbers are those of a hash: they compile in half the time."""
    with pytest.MonkeyPatch.context() as patch:
        cheap_keys.make_default(patch)
        yield
