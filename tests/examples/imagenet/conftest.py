"""Fixtures of the image script's tests."""

from collections.abc import Iterator

import pytest

from tests.examples.imagenet.runs import make_quick


@pytest.fixture(scope="module")
def quick_runs(quick_programs: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        yield
